"""Places a model's parameters in their shards: by annotation on XLA, by transformers between processes."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import align_module_device
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed import DistributedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from ..runtime import Runtime
from .mesh import BATCH_AXES, MeshShape, as_axes, check_heads, names_of
from .sharding_plan import GATHERED_OUTPUTS, Placement, Plan, Rules, bare_name


@dataclass(frozen=True)
class ShardReport:
    """The placement of every parameter. Bytes are of the parameters alone, not of gradients or optimizer state."""

    mesh: MeshShape
    placements: dict[str, Placement]
    sizes: dict[str, int]
    """Bytes of each unsharded parameter. A tied one counts once."""

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def bytes_per_device(self) -> int:
        return sum(size // self.placements[name].parts(self.mesh) for name, size in self.sizes.items())

    def __str__(self) -> str:
        """Return the totals, and on several devices the axes of each parameter as lines of a sharding plan.

        The layers of a model share their lines.
        """
        held, total = (f"{size / 2**20:.2f} MiB" for size in (self.bytes_per_device, self.total_bytes))
        lines = [f"mesh {self.mesh} on {self.mesh.devices} device(s): {held} of parameters per device, {total} in all"]
        if self.mesh.devices > 1:
            lines += dict.fromkeys(f"  {kind_of(name)}: {placement}" for name, placement in self.placements.items())
        return "\n".join(lines)


def kind_of(name: str) -> str:
    """Return a parameter's name without the number of its layer: ``model.layers.*.mlp.up_proj.weight``."""
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)


#: What transformers calls the axes.
_AXES = {"dp_replicate": "data", "fsdp": "fsdp", "tp": "tensor"}
_SPREAD_HERE = "_trl_tpu_spread"  # what a model has that was whole in each process before


def distributed_config(mesh: MeshShape) -> DistributedConfig:
    """Return what transformers takes for ``mesh``."""
    return DistributedConfig(dp_replicate_size=mesh.data, fsdp_size=mesh.fsdp, tp_size=mesh.tensor)


def mesh_of(model: Any) -> MeshShape | None:
    """Return the mesh that transformers has spread ``model`` over; None where it has not."""
    if getattr(model, "_device_mesh", None) is None:
        return None
    config = model.config.distributed_config
    return MeshShape(config.dp_replicate_size, config.fsdp_size, config.tp_size)


def shard_model(model: Any, mesh: MeshShape, runtime: Runtime, device: torch.device) -> ShardReport:
    """Give each process its part of ``model``, in place; one that is spread already stays as it is.

    All parts are of the model that process 0 has, as with DDP. Adapters are spread like what they adapt.

    Raises:
        UserError: The `tensor` axis would cut through an attention head; or transformers has read the wrong rows.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if mesh_of(base) is None:
        check_heads(mesh, _heads_of(base))
        for tensor in (*model.parameters(), *model.buffers()):
            first = tensor.detach().to(device)
            dist.broadcast(first, src=0)
            tensor.data.copy_(first)
        config, _, manager = base.prepare_distribute_model(distributed_config(mesh))
        base.maybe_distribute_model(base, config, manager)
        setattr(base, _SPREAD_HERE, True)
    elif min(mesh.fsdp, mesh.tensor) > 1 and issubclass(_StridedShard, Shard) and not hasattr(base, _SPREAD_HERE):
        raise UserError(
            f"The model was loaded with distributed_config=DistributedConfig(fsdp_size={mesh.fsdp}, "
            f"tp_size={mesh.tensor}), for which transformers reads the wrong rows on torch {torch.__version__}, where "
            f"it does not tell the two cuts of a dimension apart. Give the trainer the model's name and "
            f"mesh='{mesh}', or install a newer torch."
        )
    reshard(model)  # packed rows may have been tried
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor.data, DTensor):  # which no plan names
            tensor.data = tensor.data.to(device)
    runtime.set_mesh(mesh.sizes, mesh.slices)
    placements = {name: _placement(each, mesh) for name, each in model.named_parameters()}
    return ShardReport(mesh, placements, {name: each.nbytes for name, each in model.named_parameters()})


def _placement(parameter: nn.Parameter, mesh: MeshShape) -> Placement:
    over: list[list[str]] = [[] for _ in parameter.shape]
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if isinstance(placement, Shard) and mesh.sizes[_AXES[name]] > 1:
                over[placement.dim].append(_AXES[name])
    return Placement(tuple(map(as_axes, over)), "by transformers")


def _heads_of(base: Any) -> dict[str, int | None]:
    config = base.config.get_text_config()
    return {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}


def reshard(model: nn.Module) -> None:
    """Let each process have its parts alone again: a forward without a backward leaves FSDP2's last weights whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def saves_what_it_is_given(model: Any) -> Iterator[None]:
    """Make ``save_pretrained`` write the given weights only.

    It does not gather a sharded model at once, and peft does not write its stub of a model card.
    """
    spread_by = vars(model.config).pop("distributed_config", None)
    model.create_or_update_model_card = lambda _: None  # peft's method
    try:
        yield
    finally:
        vars(model).pop("create_or_update_model_card", None)
        if spread_by is not None:
            model.config.distributed_config = spread_by


def whole(value: Any) -> Any:
    """Return a norm over gradients that are spread as a plain tensor, the same in every process."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def plan_model(model: Any, mesh: MeshShape, rules: Rules | None = None) -> Plan:
    """Return the plan for ``model``, with or without adapters, from what transformers publishes about it.

    Raises:
        UserError: The `tensor` axis would cut through an attention head, or nothing is known to go over it; or a rule
            matches no parameter, or no rule a parameter.
    """
    if rules is not None:
        rules.check(bare_name(name) for name, _ in model.named_parameters())
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
    counts = _heads_of(base)
    grouped = counts["num_key_value_heads"]
    shared = {name for name in styles if name.endswith((".k_proj", ".v_proj"))}
    if grouped is not None and grouped % mesh.tensor and shared:
        styles = {name: "replicate" if name in shared else style for name, style in styles.items()}
        counts["num_key_value_heads"] = None
    check_heads(mesh, counts)
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
                    present = parameter.device == weight.device
                    placed[name] = parameter if present else nn.Parameter(weight, parameter.requires_grad)
        module._parameters.update({leaf: placed[name] for leaf, name in leaves.items()})
        for leaf, buffer in module.named_buffers(recurse=False):
            module._buffers[leaf] = runtime.place(buffer, (None,) * buffer.dim(), device)
    return ShardReport(plan.mesh, placements, {name: each.nbytes for name, each in model.named_parameters()})


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
