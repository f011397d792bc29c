"""Shards of a state that this host's devices hold, copied to the host and back without compiling or gathering."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch_xla
from torch.distributed.checkpoint.planner import SavePlan
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards, _sharded_cpu_state_dict


class HostShards(_CpuShards):
    """The shards of one tensor that this host's devices hold, as host tensors with their places in it."""

    def __getitem__(self, index: int) -> "HostShards":
        """Return the shards of ``tensor[index]``; the first dimension has to be whole on every device. No copy."""
        shards = [
            dataclasses.replace(shard, data=shard.data[index], indices=shard.indices[1:]) for shard in self.shards
        ]
        return HostShards(shards, self.global_shape[1:])

    def join(self) -> torch.Tensor:
        """Return the tensor, of which this host has to have all shards."""
        joined = torch.empty(self.global_shape, dtype=self.shards[0].data.dtype)
        for shard in self.shards:
            joined[tuple(shard.indices)] = shard.data[tuple(slice(0, at.stop - at.start) for at in shard.indices)]
        return joined


def local_shards(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Copy the shards that this host's devices hold to the host, of tied tensors once."""
    torch_xla.sync(wait=True)  # reading a shard while it is computed fails
    unique = {str(id(tensor)): tensor.detach() for tensor in state.values()}
    copies = {
        key: HostShards(copy.shards, copy.global_shape) if isinstance(copy, _CpuShards) else copy
        for key, copy in _sharded_cpu_state_dict(unique).items()
    }
    return {name: copies[str(id(tensor))] for name, tensor in state.items()}


class SavePlanner(SPMDSavePlanner):
    """torch_xla's planner, for tensors of which several devices of a host hold the same shard.

    Its own removes what is there twice from every plan but the first that has it. Where that is the same plan, both
    go: with `data=2,fsdp=4` no weight would be in the checkpoint.
    """

    def set_up_planner(  # type: ignore[override]  # torch's of today
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        once = {item.index: item for item in reversed(plan.items)}  # equal if of the same shard
        return dataclasses.replace(plan, items=list(once.values()))


class LoadPlanner(SPMDLoadPlanner):
    """torch_xla's planner, once the tensors are computed: reading a shard before that fails."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        torch_xla.sync(wait=True)
        super().set_up_planner(*args, **kwargs)


__all__ = ["HostShards", "LoadPlanner", "SavePlanner", "local_shards"]
