"""Apply a plan to a model: its weights to their devices, and its activations kept where the weights expect them."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from ..runtime import Runtime
from .mesh import BATCH_AXES, MeshShape, check_heads, names_of
from .rules import Rules
from .shard_report import ShardReport
from .sharding_plan import GATHERED_OUTPUTS, Placement, Plan, bare_name


def plan_model(model: Any, mesh: MeshShape, rules: Rules | None = None) -> Plan:
    """Return the plan for ``model``, with or without adapters, from what transformers publishes about it.

    Raises:
        UserError: The `tensor` axis would cut through an attention head, or nothing is known to go over it.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    styles, expert_styles = (getattr(base, name, None) or {} for name in ("tp_plan", "ep_plan"))
    if mesh.tensor > 1 and any("attn" in name and style == "colwise" for name, style in styles.items()):
        styles = _with_whole_heads(base, mesh, styles)
    if mesh.tensor > 1 and rules is None and not (styles or expert_styles):
        raise UserError(
            f"mesh '{mesh}': {type(base).__name__} has no tensor-parallel plan in transformers, so nothing is known "
            f"to go over tensor={mesh.tensor}. Leave `tensor` out, or write a `sharding_plan`."
        )
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return Plan(mesh, styles, expert_styles, frozenset(bare_name(name) for name in tables), rules)


def _with_whole_heads(base: Any, mesh: MeshShape, styles: Mapping[str, str]) -> Mapping[str, str]:
    """Return the styles of a model, changed so that `tensor` does not cut its attention heads.

    Fewer key and value heads than devices, or a number that these do not divide, stay whole over `tensor`: they are
    the small part of grouped-query attention (https://arxiv.org/abs/2305.13245), and every device computes them.

    Raises:
        UserError: The query heads do not divide, or key and value heads do not in a projection of all three.
    """
    config = base.config.get_text_config()
    counts = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    grouped = counts["num_key_value_heads"]
    shared = {name for name in styles if name.endswith((".k_proj", ".v_proj"))}
    if grouped is not None and grouped % mesh.tensor and shared:
        styles = {name: "replicate" if name in shared else style for name, style in styles.items()}
        counts["num_key_value_heads"] = None
    check_heads(mesh, {name: count for name, count in counts.items() if count is not None})
    return styles


def place_model(model: nn.Module, plan: Plan, runtime: Runtime, device: torch.device) -> ShardReport:
    """Move ``model`` to the plan's mesh in place, each parameter straight to its shards; buffers go whole to all.

    Tied parameters stay tied and count once. Each is freed on the host before the next module's go, unless others hold
    it; what is still in a checkpoint's files (see `load_classifier`) is read then.

    Raises:
        UserError: From `Plan.place`, or from `Runtime.set_mesh`.
    """
    runtime.set_mesh(plan.mesh.sizes, plan.mesh.slices)
    placements = {name: plan.place(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}  # a tied one has several
    names = {name: first_names[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
    placed: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        leaves = {
            leaf: names[f"{path}.{leaf}" if path else leaf] for leaf, _ in module.named_parameters(recurse=False)
        }
        with align_module_device(module):  # reads what is in files
            for leaf, name in leaves.items():
                if name not in placed:
                    parameter = module._parameters[leaf]
                    assert parameter is not None
                    weight = runtime.place(parameter.detach(), placements[name].axes, device)
                    is_there = parameter.device == weight.device
                    placed[name] = parameter if is_there else nn.Parameter(weight, parameter.requires_grad)
        module._parameters.update({leaf: placed[name] for leaf, name in leaves.items()})
        for leaf, buffer in module.named_buffers(recurse=False):
            module._buffers[leaf] = runtime.place(buffer, (None,) * buffer.dim(), device)
    return ShardReport.of(model, plan.mesh, placements)


def keep_activations_split(
    model: nn.Module, plan: Plan, placements: Mapping[str, Placement], runtime: Runtime
) -> None:
    """Keep activations split by forward hooks: batches over the batch axes, heads and inner features over `tensor`.

    Left alone, GSPMD follows the weights' sharding into the activations and gathers whole batches on every device.
    """
    for name, module in model.named_modules():
        weight = placements.get(f"{name}.weight")
        if isinstance(module, nn.Embedding) and weight is not None and weight.axes[0] is None and weight.is_sharded:
            _look_up_features(module, weight.axes[1], plan.mesh, runtime)
        elif isinstance(module, nn.Linear) and weight is not None:
            gathered = plan.style_of(f"{bare_name(name)}.weight") in GATHERED_OUTPUTS
            out = "tensor" if "tensor" in names_of(weight.axes[0]) and not gathered else None
            _constrain(module, BATCH_AXES, out, runtime)
        elif isinstance(module, GradientCheckpointingLayer | nn.Embedding):
            _constrain(module, BATCH_AXES, None, runtime)


def _look_up_features(module: nn.Embedding, axes: Any, mesh: MeshShape, runtime: Runtime) -> None:
    """Let each device look up its own features, ``axes``, of all tokens that its copies of the table serve.

    The tokens' ids are small, and the features go to where their rows are: over `fsdp` in exchange for rows, then
    over `tensor`. The table itself, and its gradient, go nowhere.
    """

    def gather_ids(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *others = inputs
        return (runtime.constrain(ids, ("data", *([None] * (ids.dim() - 1)))), *others)

    module.register_forward_pre_hook(gather_ids)
    _constrain(module, "data", axes, runtime)
    if mesh.tensor > 1:
        _constrain(module, BATCH_AXES, "tensor", runtime)
    _constrain(module, BATCH_AXES, None, runtime)


def _constrain(module: nn.Module, first: Any, last: Any, runtime: Runtime) -> None:
    """Lay the outputs of ``module`` out: rows over the axes ``first``, their features over ``last``."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2:
            return output
        hidden = runtime.constrain(hidden, (first, *([None] * (hidden.dim() - 2)), last))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    module.register_forward_hook(hook)


def zeros_laid_out_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros with the shape, type and sharding of ``parameter``."""
    if isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)  # of rows that two axes cut a product would have others
    # on XLA a product carries the parameter's sharding into the new tensor; zeros_like would come out replicated
    return (parameter.detach() * 0).nan_to_num(0.0)  # some weight may be infinite
