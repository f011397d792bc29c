"""Trace what a trainer would run on devices, without data: tensors have shapes only, and programs are kept, not run.

A tensor that would hold data is torch_xla's placeholder. Where the trainer would execute what it recorded, the program
is kept as HLO, and what it computed becomes placeholders too; so a whole run can be traced, of any size, on one host.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch.utils.data import DataLoader

from . import Axes
from .xla import XlaRuntime

_C = torch_xla._XLAC


@dataclass(frozen=True)
class Known:
    """What a placeholder stands for: a name, a kind such as "weight", and the mesh axes of each dimension."""

    name: str
    kind: str
    axes: Axes


@dataclass(frozen=True)
class Input:
    """One argument of a recorded program. ``known`` is None for numbers that torch_xla makes arguments itself."""

    known: Known | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    donated: bool
    """Whether its memory goes to a result: the tensor was overwritten."""


@dataclass(frozen=True)
class Program:
    """What would have been executed at a boundary: a serialised HloModuleProto, and its arguments in order."""

    hlo: bytes
    inputs: tuple[Input, ...]


class PlaceholderRuntime(XlaRuntime):
    """The `Runtime` for PyTorch/XLA with nothing on its devices, compiled for TPUs later.

    Args:
        stop: Called with each program, in order; may raise to end the trace.
    """

    def __init__(self, stop: Callable[[Program], None] = lambda program: None) -> None:
        self._stop = stop
        self._known: dict[int, Known] = {}

    @cached_property
    def attention_kernel(self) -> Callable[..., torch.Tensor]:  # type: ignore[override]
        from .splash import splash_attention

        return splash_attention

    def has_attention_kernel(self) -> bool:
        return True

    # ---- tensors without data

    def know(self, tensor: torch.Tensor, name: str, kind: str, axes: Axes) -> None:
        """Say what ``tensor`` stands for."""
        self._known[_C._xla_get_tensor_id(tensor)] = Known(name, kind, axes)

    def place(self, tensor: torch.Tensor, axes: Axes, device: torch.device) -> torch.Tensor:
        if tensor.device.type != "xla":
            tensor = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        self.know(tensor, "", "other", axes)
        return tensor

    def upload(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self.place(tensor, (None,) * tensor.dim(), device)

    def constrain(self, tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
        known = self._known.get(_C._xla_get_tensor_id(tensor)) if tensor.device.type == "xla" else None
        if known is not None and any(known.axes):
            tensor = tensor + 0  # as of a tensor with data, which would have a layout
        return super().constrain(tensor, axes)

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> "Batches":  # type: ignore[override]
        return Batches(batches, partial(self._batch, batch_axes), self.step_boundary)

    def _batch(self, batch_axes: tuple[str, ...], name: str, tensor: torch.Tensor) -> torch.Tensor:
        sizes = self._mesh.shape()
        shards = prod(sizes[axis] for axis in batch_axes)
        divides = tensor.dim() > 0 and shards > 1 and tensor.shape[0] % shards == 0
        rest = (None,) * (tensor.dim() - 1)
        axes: Axes = (batch_axes, *rest) if divides else (None,) * tensor.dim()
        placed = self.place(tensor, axes, torch_xla.device())
        self.know(placed, name, "batch", axes)
        return placed

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def to_host(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError("Nothing can be saved: placeholders have no data.")

    # ---- programs

    def step_boundary(self) -> None:
        pending = _pending()
        if not pending:
            return
        program = self._record([group[0] for group in pending.values()])
        for group in pending.values():
            source = xb.create_placeholder_tensor(tuple(group[0].shape), group[0].dtype)
            for tensor in group:
                _C._replace_xla_tensor(tensor, source)
        self._stop(program)

    def _record(self, outputs: list[torch.Tensor]) -> Program:
        overwritten = {_C._xla_get_tensor_view_alias_id(tensor) for tensor in outputs}
        ids, tensors = _C._get_tensors_xla_device_data_node(outputs)
        inputs = tuple(
            Input(self._known.get(number), tuple(tensor.shape), tensor.dtype, number in overwritten)
            for number, tensor in zip(ids, tensors, strict=True)
        )
        return Program(_C._get_xla_tensors_hlo_proto(outputs), inputs)


class Batches:
    """Batches of placeholders, with a boundary before each, as the `DeviceLoader` has one."""

    def __init__(
        self,
        batches: DataLoader,
        place: Callable[[str, torch.Tensor], torch.Tensor],
        boundary: Callable[[], None],
    ) -> None:
        self.batches = batches
        self._place, self._boundary = place, boundary

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            self._boundary()
            yield self._placed("batch", batch)
        self._boundary()

    def set_epoch(self, epoch: int) -> None:
        """The order of pairs does not matter here."""

    def _placed(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._placed(key, part) for key, part in value.items()}
        if isinstance(value, list):
            return [self._placed(name, part) for part in value]
        return self._place(name, value) if isinstance(value, torch.Tensor) else value


def _pending() -> dict[int, list[torch.Tensor]]:
    """Every tensor that a boundary would compute, by number and so in torch_xla's order; several may share one."""
    found: dict[int, list[torch.Tensor]] = {}
    for each in gc.get_objects():
        # type(), since isinstance would wake up lazy modules and proxies
        if issubclass(type(each), torch.Tensor) and each.device.type == "xla":
            found.setdefault(_C._xla_get_tensor_id(each), []).append(each)
    numbers = sorted(found)
    if not numbers:
        return {}
    needed = _C._check_tensor_need_materialization([found[number][0] for number in numbers])
    return {number: found[number] for number, is_needed in zip(numbers, needed, strict=True) if is_needed}


def hlo_sharding(sizes: Mapping[str, int], axes: Axes) -> str:
    """A layout over a mesh, whose devices are numbered with the last axis fastest, in HLO's words."""
    over = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in axes]
    used = [axis for dimension in over for axis in dimension if sizes[axis] > 1]
    if not used:
        return "{replicated}"
    names = list(sizes)
    rest = [axis for axis in names if axis not in used and sizes[axis] > 1]
    tiles = [prod(sizes[axis] for axis in dimension) for dimension in over]
    tiles += [prod(sizes[axis] for axis in rest)] if rest else []
    order = [names.index(axis) for axis in (*used, *rest)]
    order += [number for number in range(len(names)) if number not in order]
    devices = np.arange(prod(sizes.values())).reshape(*sizes.values()).transpose(order).ravel()
    replicated = " last_tile_dim_replicate" if rest else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, devices))}{replicated}}}"
