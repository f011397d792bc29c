"""Tensors on disk by torch.distributed.checkpoint's plans, every part of a tensor in a safetensors file.

torch's own files would need pickle to be read. Here each file is one of safetensors, which says the place of its
parts, so nothing in a checkpoint can run code, and any mesh, or plain torch, reads what any other wrote. Each file's
SHA-256 is made while it is written.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..runtime import Runtime

# one process saves alone on purpose, and torch looks at its own deprecated storage
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch.distributed.checkpoint")

_MODEL_FILE = "model{suffix}.safetensors"
_MODEL_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(model|adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")
_FILE_SIZE = "5GB"
"""Of a model file: serialized, each is in host memory once more."""


def write_state(shards: Mapping[str, Any], folder: Path, runtime: Runtime) -> dict[str, str]:
    """Write what `Runtime.local_shards` gave to ``folder``; all processes take part, from any thread.

    Returns:
        The SHA-256 of each file that this process wrote, by its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planners, writer = runtime.checkpoint_planners(), _ShardWriter(folder)
    group = planners.group
    dcp.save(dict(shards), storage_writer=writer, planner=planners.save, process_group=group, no_dist=group is None)
    return writer.checksums


def read_state(tensors: Mapping[str, torch.Tensor], folder: Path, runtime: Runtime) -> None:
    """Read named tensors from the safetensors files of ``folder`` in place; all processes take part.

    Raises:
        CheckpointException: A tensor is missing, or has another shape.
    """
    planners = runtime.checkpoint_planners()
    group = planners.group
    runtime.step_boundary()
    dcp.load(
        dict(tensors),
        storage_reader=HuggingFaceStorageReader(str(folder)),
        planner=planners.load,
        process_group=group,
        no_dist=group is None,
    )
    runtime.step_boundary()
    runtime.all_gather_object(None)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the safetensors files of ``folder``, whole or in shards, on the meta device."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in found.items()
        if isinstance(saved, TensorStorageMetadata)
    }


def write_model_files(weights: Mapping[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write whole weights to safetensors files that ``from_pretrained`` reads; returns the SHA-256 of each file."""
    split = split_torch_state_dict_into_shards(dict(weights), filename_pattern=_MODEL_FILE, max_shard_size=_FILE_SIZE)
    checksums = {}
    for file, names in split.filename_to_tensors.items():
        content = save({name: weights[name].contiguous() for name in names}, {"format": "pt"})
        (folder / file).write_bytes(content)
        checksums[file] = hashlib.sha256(content).hexdigest()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _MODEL_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return checksums


def older_weights(there: Iterable[str], new: Iterable[str]) -> list[str]:
    """Return which files of ``there`` are weights of the kinds of ``new``, and not among them: of an older model."""
    new = set(new)
    kinds = {match[1] for name in new if (match := _WEIGHTS.fullmatch(name))}
    found = [match for name in there if (match := _WEIGHTS.fullmatch(name)) and name not in new]
    return [match[0] for match in found if match[1] in kinds]


def replace_model_files(staging: Path, folder: Path) -> None:
    """Move a saved model's files to ``folder``, and remove weights of an older one there that are not among them."""
    new = [path.name for path in staging.iterdir()]
    for name in older_weights([path.name for path in folder.iterdir()], new):
        (folder / name).unlink()
    for path in list(staging.iterdir()):
        target = folder / path.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)  # another adapter's
        path.replace(target)


def join_shards(shards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of `Runtime.local_shards`, where one process has all shards; tied tensors stay tied."""
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


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes a file for each host and device: torch's has one a host, in which shards of a tensor would collide."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.checksums: dict[str, str] = {}
        self.fs = _HashingFileSystem(self.checksums)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        of_device: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            of_device.setdefault(item.index.index or 0, []).append(item)
        files: Queue = Queue()
        for device, items in of_device.items():
            name = f"host-{plan.storage_data['shard_index'] - 1:05d}-device-{device:03d}.safetensors"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


class _HashingFileSystem(FileSystem):
    """torch's local file system, which makes the SHA-256 of what is written."""

    def __init__(self, checksums: dict[str, str]) -> None:
        self._checksums = checksums

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield hashing
        self._checksums[Path(path).name] = hashing.sha256.hexdigest()


class _HashingStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        return self._stream.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


__all__ = [
    *("join_shards", "older_weights", "read_state", "replace_model_files", "tensors_in"),
    *("to_host", "write_model_files", "write_state"),
]
