"""State on disk: torch.distributed.checkpoint's plans, every part of a tensor in a safetensors file.

torch's own files would need pickle to be read. Here each file is one of safetensors, which says the place of its
parts, so nothing in a checkpoint can run code, and any mesh, or plain torch, reads what any other wrote.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

# one process saves alone on purpose, and torch looks at its own deprecated storage
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch.distributed.checkpoint")


class PartWriter(HuggingFaceStorageWriter):
    """Writes a file for each host and device: torch's has one a host, in which parts of a tensor would collide."""

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


def write_state(
    state: Mapping[str, Any], folder: Path, planner: SavePlanner | None = None, group: ProcessGroup | None = None
) -> None:
    """Write named tensors, or what ``planner`` takes for one, to ``folder``; all processes of ``group`` take part."""
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(
        dict(state), storage_writer=PartWriter(folder), planner=planner, process_group=group, no_dist=group is None
    )


def read_state(
    state: Mapping[str, Any], folder: Path, planner: LoadPlanner | None = None, group: ProcessGroup | None = None
) -> None:
    """Read named tensors from ``folder`` in place; all processes of ``group`` take part.

    Raises:
        CheckpointException: A tensor is missing, or has another shape.
    """
    dcp.load(
        dict(state),
        storage_reader=HuggingFaceStorageReader(str(folder)),
        planner=planner,
        process_group=group,
        no_dist=group is None,
    )


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that `write_state` wrote to ``folder``, without their values: on the meta device."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in found.items()
        if isinstance(saved, TensorStorageMetadata)
    }
