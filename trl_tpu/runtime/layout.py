"""Layouts of tensors over the mesh: what torch_xla's own ways to say so leave out."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from .base import PartitionSpec

Change = Callable[[torch.Tensor, xs.Mesh, PartitionSpec], torch.Tensor]


class MeshSharding(xs.ShardingSpec):
    """A ShardingSpec that also accepts specs which leave mesh axes out.

    torch_xla 2.9 computes the tile assignment of a spec without a None dimension as if it named every axis
    (https://github.com/pytorch/xla/issues/8012); the mesh's own method handles that case.
    """

    def __post_init__(self) -> None:
        # a scalar has no dimensions to ask about
        spec = self.partition_spec or (None,)
        tiles, groups, replication, kind = self.mesh._get_op_sharding_args(spec)
        self._tile_assignment, self._group_assignment, self._replication_groups = tiles, groups, replication
        self._sharding_type = xs.ShardingType(kind)


def shard_count(mesh: xs.Mesh, over: str | tuple[str, ...] | None) -> int:
    """Return how many shards the axes of one dimension cut it into."""
    sizes = mesh.shape()
    return prod(sizes.get(axis, 1) for axis in ((over,) if isinstance(over, str) else over or ()))


def laid_out(tensor: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec) -> torch.Tensor:
    """Return a copy of ``tensor``, and let its gradient be one, laid out over those of ``axes`` that divide it."""
    fitting = tuple(
        None if size % shard_count(mesh, over) else over for size, over in zip(tensor.shape, axes, strict=True)
    )
    if torch_xla._XLAC._get_xla_sharding_spec(tensor):
        tensor = tensor + 0  # a tensor that was laid out keeps that layout; what is computed from it need not
    copy: torch.Tensor = Changed.apply(tensor, mesh, fitting, _marked, _marked)
    return copy


class Changed(torch.autograd.Function):
    """What ``change`` makes of a tensor, and of its gradient what ``change_back`` does.

    torch_xla's own function for a sharding (`mark_sharding_with_gradients`) parses the mesh at every call.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec, change: Change, change_back: Change
    ) -> torch.Tensor:
        ctx.mesh, ctx.axes, ctx.change_back = mesh, axes, change_back
        return change(tensor, mesh, axes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.change_back(gradient, ctx.mesh, ctx.axes), None, None, None, None


def _marked(tensor: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec) -> torch.Tensor:
    copy = tensor.clone()
    torch_xla._XLAC._xla_mark_sharding(copy, mesh.get_op_sharding(axes))
    return copy
