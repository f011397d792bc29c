"""Weights of a checkpoint on disk, read one at a time. Nothing in it is unpickled."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from .state_dict import STATE_FOLDER
from .weight_files import ADAPTER_FILE, MODEL_FILE

_PREFIX = "model."  # of the model's tensors in the state


class Stored(Protocol):
    """Tensors on disk, by name."""

    #: without their values, on the meta device
    tensors: dict[str, torch.Tensor]

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the host."""


class StoredFiles:
    """The weights in safetensors files as transformers writes them: under the names for ``from_pretrained``."""

    def __init__(self, folder: Path, file: str) -> None:
        index = folder / f"{file}.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in dict.fromkeys(weight_map.values())]
        else:
            files = [folder / file]
        self.tensors: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, Path] = {}
        for path in files:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # no mapping
                    shape = stored.get_slice(name).get_shape()
                    # of no rows, for its dtype
                    dtype = (stored.get_slice(name)[:0] if shape else stored.get_tensor(name)).dtype
                    self.tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
                    self._file_of[name] = path

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt", backend="pread") as stored:  # not mapped into memory
            return stored.get_tensor(name)


class StoredState:
    """The model's tensors in a checkpoint's sharded state, from any mesh: under the names of its state dict."""

    def __init__(self, folder: Path) -> None:
        contents = HuggingFaceStorageReader(str(folder)).read_metadata()
        self._file_of = contents.storage_data
        self._saved = {
            name.removeprefix(_PREFIX): saved
            for name, saved in contents.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata) and name.startswith(_PREFIX)
        }
        for name, saved in self._saved.items():
            if sum(part.sizes.numel() for part in saved.chunks) != saved.size.numel():
                raise ValueError(f"{folder} lacks parts of the weight {name}. A file of it is missing: copy it anew.")
        self.tensors = {
            name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
            for name, saved in self._saved.items()
        }

    def read(self, name: str) -> torch.Tensor:
        # not by `dcp.load`: it looks into every file for every tensor, and leaves the last ones in reference cycles
        host = torch.empty_like(self.tensors[name], device="cpu")
        for part in self._saved[name].chunks:
            file = self._file_of[MetadataIndex(_PREFIX + name, part.offsets)].relative_path
            ranges = zip(part.offsets, part.sizes, strict=True)
            place = tuple(slice(start, start + size) for start, size in ranges)
            with safe_open(file, framework="pt", backend="pread") as stored:
                host[place].copy_(stored.get_tensor(_PREFIX + name))
        return host


def stored_weights(folder: Path, file: str = MODEL_FILE) -> Stored:
    """The weights of a checkpoint: from transformers' safetensors files, else from its sharded state.

    Raises:
        ValueError: It has neither, what there is would have to be unpickled, or a file is torn.
    """
    state = folder / STATE_FOLDER
    if (folder / file).is_file() or (folder / f"{file}.index.json").is_file():
        return _readable(lambda: StoredFiles(folder, file), folder)
    if any(state.glob("*.safetensors")):
        return _readable(lambda: StoredState(state), state)
    pickled = [path for pattern in ("*.bin", "*.pt", f"{STATE_FOLDER}/*.distcp") for path in folder.glob(pattern)]
    what = f", only pickled files such as {pickled[0].name}, which could run code and are not read" if pickled else ""
    kind = "adapters" if file == ADAPTER_FILE else "weights"
    raise ValueError(
        f"{folder} has no {kind} in safetensors: neither {file} nor {STATE_FOLDER}/*.safetensors{what}. Give the "
        "folder of a checkpoint (`output_dir/checkpoint-N`) or of a saved model."
    )


def _readable(read: Callable[[], Stored], folder: Path) -> Stored:
    try:
        return read()
    except (SafetensorError, KeyError, json.JSONDecodeError, FileNotFoundError) as error:
        raise ValueError(
            f"The weights in {folder} cannot be read ({type(error).__name__}: {error}). A file is torn or missing: "
            "give another checkpoint."
        ) from error
