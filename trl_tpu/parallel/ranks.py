"""Spreads a model over the processes of a mesh, one a device: by transformers' own FSDP2 and tensor parallelism."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed import DistributedConfig

from ..errors import UserError
from ..runtime import Runtime
from .mesh import MeshShape, check_heads
from .shard_report import ShardReport
from .sharding_plan import Placement

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


def spread_model(model: Any, mesh: MeshShape, runtime: Runtime, device: torch.device) -> ShardReport:
    """Give each process its part of ``model``, in place; one that is spread already stays as it is.

    All parts are of the model that process 0 has, as with DDP. Adapters are spread like what they adapt.

    Raises:
        UserError: The `tensor` axis would cut through an attention head; or transformers has read the wrong rows.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if mesh_of(base) is None:
        text, names = base.config.get_text_config(), ("num_attention_heads", "num_key_value_heads")
        check_heads(mesh, {name: count for name in names if (count := getattr(text, name, None))})
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
    return ShardReport.of(model, mesh, placements)


def _placement(parameter: nn.Parameter, mesh: MeshShape) -> Placement:
    over: list[list[str]] = [[] for _ in parameter.shape]
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if isinstance(placement, Shard) and mesh.sizes[_AXES[name]] > 1:
                over[placement.dim].append(_AXES[name])
    axes = tuple(None if not names else names[0] if len(names) == 1 else tuple(names) for names in over)
    return Placement(axes, "by transformers")


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
