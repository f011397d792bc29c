"""What this host's devices hold of a state, copied to the host and back without compiling and without gathering."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr
from torch.distributed.checkpoint.planner import SavePlan
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards, _sharded_cpu_state_dict

from . import hosts
from .storage import read_state, write_state


class _SavePlanner(SPMDSavePlanner):
    """torch_xla's, for tensors of which several devices of a host hold the same part.

    Its own removes what is there twice from every plan but the first that has it. Where that is the same plan, both
    go: with `data=2,fsdp=4` no weight would be in the checkpoint.
    """

    def set_up_planner(  # type: ignore[override]  # torch's of today
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        once = {item.index: item for item in reversed(plan.items)}  # equal if of the same part
        return dataclasses.replace(plan, items=list(once.values()))


def local_shards(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Host copies of the parts that this host has; of tied tensors one."""
    torch_xla.sync(wait=True)  # reading a shard while it is computed fails
    unique = {str(id(tensor)): tensor.detach() for tensor in state.values()}
    copies = _sharded_cpu_state_dict(unique)
    return {name: copies[str(id(tensor))] for name, tensor in state.items()}


def whole(part: Any) -> torch.Tensor:
    """A tensor of a snapshot, put together from its shards, of which this host has to have all."""
    if not isinstance(part, _CpuShards):
        return part
    assembled = torch.empty(part.global_shape, dtype=part.shards[0].data.dtype)
    for shard in part.shards:
        assembled[tuple(shard.indices)] = shard.data[tuple(slice(0, at.stop - at.start) for at in shard.indices)]
    return assembled


def index_shards(part: Any, index: int) -> Any:
    """``tensor[index]`` of a tensor of a snapshot, whose first dimension is whole on every device."""
    if not isinstance(part, _CpuShards):
        return part[index]
    rows = [dataclasses.replace(shard, data=shard.data[index], indices=shard.indices[1:]) for shard in part.shards]
    return _CpuShards(rows, part.global_shape[1:])


def write(copies: Mapping[str, Any], folder: Path) -> None:
    """Write a snapshot; all hosts take part, from whatever thread."""
    write_state(copies, folder, _SavePlanner(), hosts.saving_group())


def read(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read into tensors on the devices, each device its own part; all hosts take part."""
    torch_xla.sync(wait=True)
    read_state(state, folder, SPMDLoadPlanner(), hosts.saving_group())
    torch_xla.sync(wait=True)
    if xr.process_count() > 1:
        hosts.barrier()
