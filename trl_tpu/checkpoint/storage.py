"""Tensors on disk: a model's files as transformers writes them, and shards in safetensors files by torch's plans.

torch's own files of a distributed checkpoint would need pickle to be read. Here each file is one of safetensors,
which says the place of its parts: nothing in a checkpoint can run code, and any mesh, or plain torch, reads what any
other wrote.
"""

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..runtime import Runtime

_WEIGHTS = re.compile(r"(model|adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")
_READ = re.compile(r"((adapter_)?model(-\d+-of-\d+)?|host-\d{5}-device-\d{3})\.safetensors")
_FILE_SIZE = "5GB"
"""The largest model file: while one is written, the host holds it twice."""


# ---- a model's files


def write_model(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write whole weights on the host as ``model.save_pretrained`` does, beside a config that is there already."""
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        model.save_pretrained(aside, state_dict=dict(weights), max_shard_size=_FILE_SIZE)
        for path in Path(aside).rglob("*"):
            # the config may have changed since the weights were copied, and the README is peft's stub
            if path.is_file() and path.name not in ("config.json", "README.md"):
                (target := folder / path.relative_to(aside)).parent.mkdir(exist_ok=True)
                path.rename(target)


def older_weights(there: list[str], new: list[str]) -> list[str]:
    """Return which files of ``there`` are weights of the kinds of ``new``, and not among them: of an older model."""
    kinds = {match[1] for name in new if (match := _WEIGHTS.fullmatch(name))}
    found = [match for name in there if (match := _WEIGHTS.fullmatch(name)) and name not in new]
    return [match[0] for match in found if match[1] in kinds]


# ---- shards


def write_state(shards: Mapping[str, Any], folder: Path, runtime: Runtime) -> None:
    """Write what `Runtime.local_shards` gave to ``folder``; all processes take part, from any thread.

    Raises:
        OSError: On all ranks if one could not write.
    """
    planners, writer = runtime.checkpoint_planners(), _ShardWriter(str(folder), save_distributed=True)
    group = planners.group
    with _checkpointing():
        dcp.save(
            dict(shards), storage_writer=writer, planner=planners.save, process_group=group, no_dist=group is None
        )


def read_state(tensors: Mapping[str, torch.Tensor], folder: Path, runtime: Runtime) -> None:
    """Read named tensors from the safetensors files of ``folder`` in place; all processes take part.

    Raises:
        OSError: A tensor is missing, has another shape or cannot be read; on all ranks if on one.
    """
    planners, files = runtime.checkpoint_planners(), reader_of(folder)
    group = planners.group
    runtime.step_boundary()
    with _checkpointing():
        dcp.load(
            dict(tensors), storage_reader=files, planner=planners.load, process_group=group, no_dist=group is None
        )
    runtime.step_boundary()
    runtime.all_gather_object(None)


class _OwnFiles(FileSystem):
    """Lists the files of a model and of shards: a user may have put others beside them, with tensors of any name."""

    def ls(self, path: Any) -> list[str]:
        return [each for each in super().ls(path) if _READ.fullmatch(Path(each).name)]


def reader_of(folder: Path) -> HuggingFaceStorageReader:
    """Return what reads the tensors in safetensors files of ``folder``, whole or in shards."""
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _OwnFiles()
    return reader


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the safetensors files of ``folder``, whole or in shards, on the meta device."""
    found = reader_of(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in found.items()
        if isinstance(saved, TensorStorageMetadata)
    }


def join_shards(shards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of `Runtime.local_shards`, where one process has all shards; tied tensors stay tied."""
    unique = {id(each): each if isinstance(each, torch.Tensor) else each.join() for each in shards.values()}
    return {name: unique[id(each)] for name, each in shards.items()}


def to_host(state: Mapping[str, torch.Tensor], runtime: Runtime, *, keeps: bool = True) -> dict[str, torch.Tensor]:
    """Return a state dict as host tensors, put together from shards; tied tensors stay tied. Nothing if not ``keeps``.

    All processes take part. Several gather one tensor at a time, so that only those that keep all hold all.
    """
    if runtime.topology().process_count == 1:
        return join_shards(runtime.local_shards(state)) if keeps else {}
    host: dict[int, torch.Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        whole = runtime.constrain(tensor, (None,) * tensor.dim())  # none of several processes has all shards
        copy = join_shards(runtime.local_shards({"": whole}))[""]
        if keeps:
            host[id(tensor)] = copy
    return {name: host[id(tensor)] for name, tensor in state.items()} if keeps else {}


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Run torch's distributed checkpoint without its warnings, and raise its failures as ordinary errors.

    Its CheckpointException derives from BaseException and passes every ``except Exception``. The ignored warnings say
    that one process saves alone, which is intended, and that torch uses its deprecated storage.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        try:
            yield
        except CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            raise OSError(f"process {rank}: {type(failure).__name__}: {failure}") from error


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes a file for each host and device: torch's has one a host, in which shards of a tensor would collide."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        of_device: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            of_device.setdefault(item.index.index or 0, []).append(item)
        files: Queue = Queue()
        for device, items in of_device.items():
            name = f"host-{plan.storage_data['shard_index'] - 1:05d}-device-{device:03d}.safetensors"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)
