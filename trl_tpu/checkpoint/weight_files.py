"""Weights in safetensors files as transformers has them, written one tensor at a time.

``safetensors.save_file`` takes all tensors of a file at once. The format is a table and then the tensors' bytes
(https://huggingface.co/docs/safetensors), so once the shapes are known each tensor can go to its place as it comes.
"""

import json
import os
import re
import shutil
import struct
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save

MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
_ASIDE = "_unfinished-weights"  # transformers uploads nothing that begins so


class WeightFiles:
    """Writes tensors, in any order, to the safetensors files of a folder; a context.

    The files are written aside. Leaving the context without an error puts them in place of earlier ones, the index
    last, so that at no moment a half-written or mixed set of files looks complete.

    Args:
        folder: Where the files go; it exists.
        tensors: Of each tensor the shape and dtype that it will have, on the meta device.
        max_shard_size: Of one file, such as "5GB"; a tensor that is larger has a file of its own.
        file: The name of a file that has all.

    Raises:
        ValueError: On leaving the context, where a tensor was not written.
    """

    def __init__(
        self,
        folder: str | Path,
        tensors: Mapping[str, torch.Tensor],
        max_shard_size: int | str = "50GB",
        file: str = MODEL_FILE,
    ) -> None:
        self.folder, self.tensors, self.file = Path(folder), dict(tensors), file
        self._split = split_state_dict_into_shards_factory(
            self.tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern=file.replace(".safetensors", "{suffix}.safetensors"),
            max_shard_size=max_shard_size,
        )
        self._aside = self.folder / _ASIDE
        self._files: dict[str, BinaryIO] = {}
        self._starts: dict[str, int] = {}
        self._waiting = set(self.tensors)

    def __enter__(self) -> Self:
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir()
        try:
            for file, names in self._split.filename_to_tensors.items():
                self._begin(file, names)
        except OSError:
            self._discard()
            raise
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor.

        Raises:
            ValueError: It is none of those announced, or of another shape or dtype.
        """
        announced = self.tensors.get(name)
        if announced is None or (announced.shape, announced.dtype) != (tensor.shape, tensor.dtype):
            expected = "is unknown" if announced is None else f"is {announced.dtype} {list(announced.shape)}"
            raise ValueError(f"The weight {name} {expected}, and {tensor.dtype} {list(tensor.shape)} came.")
        stream = self._files[self._split.tensor_to_filename[name]]
        stream.seek(self._starts[name])
        stream.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._waiting.discard(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._discard()

    def _begin(self, file: str, names: list[str]) -> None:
        # wide dtypes first, as safetensors has it: every tensor starts at a multiple of its item size
        names = sorted(names, key=lambda name: (-self.tensors[name].itemsize, name))
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            tensor, start = self.tensors[name], end
            end += tensor.nbytes
            dtype, shape = _dtype_name(tensor.dtype), list(tensor.shape)
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            self._starts[name] = start
        header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        for name in names:
            self._starts[name] += 8 + len(header)
        stream = self._files[file] = (self._aside / file).open("wb")
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + end)

    def _finish(self) -> None:
        if missing := sorted(self._waiting):
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(f"No value came for the weights {', '.join(missing[:5])}{more}.")
        for stream in self._files.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        self._remove_earlier()
        for file in self._files:
            os.replace(self._aside / file, self.folder / file)
        if self._split.is_sharded:
            count = sum(tensor.numel() for tensor in self.tensors.values())
            index = {
                "metadata": {"total_parameters": count, **self._split.metadata},
                "weight_map": self._split.tensor_to_filename,
            }
            path = self._aside / f"{self.file}.index.json"
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(path, self.folder / path.name)

    def _remove_earlier(self) -> None:
        """Weights of an earlier save that would be read instead of these, or beside them."""
        stem = re.escape(self.file.removesuffix(".safetensors"))
        earlier = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
        # the index first: shards without one are no model
        for path in sorted(self.folder.iterdir(), key=lambda path: not path.name.endswith(".json")):
            if earlier.fullmatch(path.name) and path.is_file() and path.name not in self._files:
                path.unlink()

    def _discard(self) -> None:
        for stream in self._files.values():
            with suppress(OSError):  # what a full disk did not take
                stream.close()
        shutil.rmtree(self._aside, ignore_errors=True)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """safetensors' word for a dtype, which its Python interface tells by the files that it writes."""
    written = save({"tensor": torch.empty(0, dtype=dtype)})
    (length,) = struct.unpack("<Q", written[:8])
    return json.loads(written[8 : 8 + length])["tensor"]["dtype"]
