"""State on disk: torch.distributed.checkpoint's plans, every shard of a tensor in a safetensors file.

torch's own files would need pickle to be read. Here each file is one of safetensors, which says the place of its
shards, so nothing in a checkpoint can run code, and any mesh, or plain torch, reads what any other wrote.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..runtime import Runtime

# one process saves alone on purpose, and torch looks at its own deprecated storage
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch.distributed.checkpoint")


class ShardWriter(HuggingFaceStorageWriter):
    """Writes a file for each host and device: torch's has one a host, in which shards of a tensor would collide."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        of_device: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            of_device.setdefault(item.index.index or 0, []).append(item)
        files: Queue = Queue()
        for device, items in of_device.items():
            name = f"host-{plan.storage_data['shard_index'] - 1:05d}-device-{device:03d}.safetensors"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


def write_state(shards: Mapping[str, Any], folder: Path, runtime: Runtime) -> None:
    """Write `Runtime.local_shards` to ``folder``, each process its own; all processes take part, from any thread."""
    folder.mkdir(parents=True, exist_ok=True)
    planners = runtime.checkpoint_planners()
    dcp.save(
        dict(shards),
        storage_writer=ShardWriter(folder),
        planner=planners.save,
        process_group=planners.group,
        no_dist=planners.group is None,
    )


def read_state(state: Mapping[str, torch.Tensor], folder: Path, runtime: Runtime) -> None:
    """Read what any runtime on any mesh wrote into tensors, which keep their layout; all processes take part.

    Raises:
        CheckpointException: A tensor is missing, or has another shape.
    """
    planners = runtime.checkpoint_planners()
    dcp.load(
        dict(state),
        storage_reader=HuggingFaceStorageReader(str(folder)),
        planner=planners.load,
        process_group=planners.group,
        no_dist=planners.group is None,
    )
    runtime.step_boundary()


def join_shards(shards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of `Runtime.local_shards`, where one process has all parts; tied tensors stay tied."""
    unique = {id(each): each if isinstance(each, torch.Tensor) else each.join() for each in shards.values()}
    return {name: unique[id(each)] for name, each in shards.items()}


def to_host(state: Mapping[str, torch.Tensor], runtime: Runtime) -> dict[str, torch.Tensor]:
    """Return a state dict as host tensors, put together from shards; tied tensors stay tied.

    All processes take part.
    """
    if runtime.topology().process_count > 1:  # none of several processes has all shards
        whole = {id(tensor): runtime.constrain(tensor, (None,) * tensor.dim()) for tensor in state.values()}
        state = {name: whole[id(tensor)] for name, tensor in state.items()}
    return join_shards(runtime.local_shards(state))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that `write_state` wrote to ``folder``, without their values: on the meta device."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in found.items()
        if isinstance(saved, TensorStorageMetadata)
    }
