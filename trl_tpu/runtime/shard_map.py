"""Computations that each device does with its own shards of tensors, without XLA's partitioner.

Between a whole tensor and its shards stands a change of view, to the shards and back, that moves no data where the
tensor is laid out so already. https://docs.pytorch.org/xla/release/r2.9/perf/spmd_advanced.html
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla.distributed.spmd as xs

from .base import PartitionSpec
from .layout import Changed, shard_count


def on_shards(
    runtime: Any,
    function: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    axes: Sequence[PartitionSpec],
    result_axes: PartitionSpec,
) -> torch.Tensor:
    """Call ``function`` as `Runtime.shard_map` says: that method of PyTorch/XLA's runtime."""
    mesh = runtime.mesh_of(tensors[0])
    if mesh is None:
        return function(*tensors)
    dividing = _dividing_axes(mesh, tensors, axes)
    shards = [
        Changed.apply(tensor, mesh, _only(over, dividing), _to_shards, _to_whole)
        for tensor, over in zip(tensors, axes, strict=True)
    ]
    return Changed.apply(function(*shards), mesh, _only(result_axes, dividing), _to_whole, _to_shards)


def _to_shards(whole: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec) -> torch.Tensor:
    # a copy, since the layout is written to the tensor itself
    return xs.enable_manual_sharding(whole + 0, axes, mesh=mesh).global_tensor


def _to_whole(shard: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec) -> torch.Tensor:
    shape = torch.Size(size * shard_count(mesh, over) for size, over in zip(shard.shape, axes, strict=True))
    return xs.disable_manual_sharding(shard, axes, shape, mesh=mesh).global_tensor


def _dividing_axes(mesh: xs.Mesh, tensors: Sequence[torch.Tensor], axes: Sequence[PartitionSpec]) -> set[Any]:
    """Return the entries of ``axes`` that are more than one device and divide all dimensions they are named for."""
    sizes: dict[Any, set[int]] = {}
    for tensor, over_all in zip(tensors, axes, strict=True):
        for over, size in zip(over_all, tensor.shape, strict=True):
            sizes.setdefault(over, set()).add(size)
    counts = {over: shard_count(mesh, over) for over in sizes}
    return {over for over, count in counts.items() if count > 1 and all(size % count == 0 for size in sizes[over])}


def _only(axes: PartitionSpec, dividing: set[Any]) -> PartitionSpec:
    return tuple(over if over in dividing else None for over in axes)
