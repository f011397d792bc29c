"""Apply a plan to a model: its weights to their devices, and its activations kept where the weights expect them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..runtime import Runtime
from .mesh import MeshShape, check_heads
from .plan import Placement, Plan, bare_name
from .report import ShardReport
from .rules import Rules


def plan_model(model: Any, mesh: MeshShape, rules: Rules | None = None) -> Plan:
    """The plan for ``model``, with or without adapters, from what transformers publishes about it.

    Raises:
        ValueError: The `tensor` axis would cut through an attention head.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    styles, expert_styles = (getattr(base, name, None) or {} for name in ("tp_plan", "ep_plan"))
    if mesh.tensor > 1 and any("attn" in name and style == "colwise" for name, style in styles.items()):
        config = base.config.get_text_config()
        counts = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        check_heads(mesh, {name: count for name, count in counts.items() if count is not None})
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return Plan(mesh, styles, expert_styles, frozenset(bare_name(name) for name in tables), rules)


def place_model(model: nn.Module, plan: Plan, runtime: Runtime, device: torch.device) -> ShardReport:
    """Move ``model`` to the device in place, each parameter straight to its shards; buffers go whole to all.

    Tied parameters stay tied, count once, and each is freed on the host before the next goes, unless others hold it.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    placements = plan.place(shapes)
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    places = _places(model)
    for name, placement in placements.items():
        module, leaf = places[name][0]
        parameter = module._parameters[leaf]
        assert parameter is not None
        placed = runtime.place(parameter.detach(), placement.axes, device)
        if parameter.device != placed.device:
            parameter = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            for module, leaf in places[name]:
                module._parameters[leaf] = parameter
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = runtime.place(buffer, (None,) * buffer.dim(), device)
    return ShardReport(plan.mesh, placements, shapes, sizes)


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Every module and attribute that holds a parameter, by the name under which it is listed first."""
    names: dict[int, str] = {}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), f"{prefix}.{leaf}" if prefix else leaf)
                places.setdefault(name, []).append((module, leaf))
    return places


def keep_activations_split(model: nn.Module, plan: Plan, placements: Mapping[str, Placement], runtime: Runtime) -> None:
    """Keep activations split by forward hooks: batches over the batch axes, heads and inner features over `tensor`.

    Left alone, GSPMD follows the weights' sharding into the activations and gathers whole batches on every device.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            table = placements.get(f"{name}.weight")
            by_features = table is not None and table.axes[0] is None and table.is_sharded
            _look_up_features(module, table.axes[1], plan.mesh, runtime) if by_features else _constrain(
                module, plan.mesh, runtime
            )
        elif isinstance(module, GradientCheckpointingLayer):
            _constrain(module, plan.mesh, runtime)
        elif plan.mesh.tensor > 1 and plan.style_of(f"{bare_name(name)}.weight") == "colwise":
            _constrain(module, plan.mesh, runtime, "tensor")


def _look_up_features(module: nn.Embedding, axes: Any, mesh: MeshShape, runtime: Runtime) -> None:
    """Let each device look up its own features, ``axes``, of all tokens that its copies of the table serve.

    The tokens' ids are small, and the features go to where their rows are: over `fsdp` in exchange for rows, then
    over `tensor`. The table itself, and its gradient, go nowhere.
    """

    def gather_ids(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *others = inputs
        if ids.shape[0] % mesh.batch_shards:
            return inputs
        return (runtime.constrain(ids, ("data", *([None] * (ids.dim() - 1)))), *others)

    module.register_forward_pre_hook(gather_ids)
    _constrain(module, mesh, runtime, axes, rows="data")
    if mesh.tensor > 1:
        _constrain(module, mesh, runtime, "tensor")
    _constrain(module, mesh, runtime)


def _constrain(module: nn.Module, mesh: MeshShape, runtime: Runtime, last: Any = None, rows: Any = None) -> None:
    """Lay the outputs of ``module`` out: rows over the batch axes unless given, the last dimension over ``last``."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or hidden.shape[0] % mesh.batch_shards:
            return output
        hidden = runtime.constrain(hidden, (rows or mesh.batch_axes, *([None] * (hidden.dim() - 2)), last))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    module.register_forward_hook(hook)
