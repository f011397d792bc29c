"""Trace what a trainer would run on devices, without data: tensors have shapes only, and programs are kept, not run.

A tensor that would hold data is torch_xla's placeholder. Where the trainer would execute what it recorded, the program
is kept as HLO, and what it computed becomes placeholders too; so a whole run can be traced, of any size, on one host.
This happens in a process of its own, in which two functions of libraries are replaced: of torch_xla and of jax.
"""

import dataclasses
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.runtime as xr
from torch.utils.data import DataLoader

from ..runtime import PartitionSpec
from ..runtime.layout import shard_count
from ..runtime.xla import DeviceLoader, Upload, XlaRuntime

_C = torch_xla._XLAC
_KERNELS_VERSION = 6
"""That libtpu 0.0.21, torch_xla 2.9's, reads; it is written in a kernel, so that later ones read it too."""


@dataclass(frozen=True, eq=False)
class AbstractValue:
    """What a placeholder stands for, until another takes its place: a kind such as "weight", and how it is laid out.

    Numbers that torch_xla makes arguments itself are "other", and whole on every device.
    """

    kind: str = "other"
    sharding: Any = None
    """torch_xla's `OpSharding`; None is replicated."""
    text: str = "{replicated}"
    """The same in HLO's notation."""

    @property
    def parts(self) -> int:
        """Into how many parts the mesh cuts it: the product of the tile's sizes, of which the last may be copies."""
        sizes = list(map(int, re.findall(r"\d+", self.text.partition("]")[0])))
        return prod(sizes[:-1] if "last_tile_dim_replicate" in self.text else sizes)


@dataclass(frozen=True)
class Program:
    """What would have been executed at a boundary: a serialized HloModuleProto, and its arguments in order.

    An argument is donated if its memory goes to a result: the tensor was overwritten.
    """

    hlo: bytes
    arguments: tuple[AbstractValue, ...]
    donated: tuple[bool, ...]


class PlaceholderRuntime(XlaRuntime):
    """The `Runtime` for PyTorch/XLA with nothing on its devices, compiled for TPUs later.

    Args:
        chips: Devices of the mesh, which may be more than torch_xla has: torch counts a backend's devices in eight
            bits, and of 128 and more it sees none.
    """

    def __init__(self, chips: int) -> None:
        self.programs: list[Program] = []
        self._chips = chips
        self._values: dict[int, AbstractValue] = {}  # by the number of a tensor
        self._latest: dict[int, int] = {}  # of each memory, by the number of its first tensor, the latest tensor's
        super().__init__()
        # which torch_xla asks when a mesh is made
        xr.global_runtime_device_count = lambda: self._chips  # type: ignore[assignment]

    @cached_property
    def attention_kernel(self) -> Callable[..., torch.Tensor]:  # type: ignore[override]
        from ..runtime.kernels.splash import splash_attention

        write_kernels_for_libtpu()
        return splash_attention

    @property
    def has_attention_kernel(self) -> bool:
        return True

    # ---- tensors without data

    def describe(self, tensor: torch.Tensor, kind: str, axes: PartitionSpec) -> AbstractValue:
        """Say what ``tensor`` stands for, and which mesh axes its dimensions go over."""
        like = self._laid_out(tensor, axes)
        value = AbstractValue(kind, _C._get_xla_op_sharding(like), _C._get_xla_sharding_spec(like))
        self._values[_C._xla_get_tensor_id(tensor)] = value
        return value

    def _laid_out(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        """Return what is computed from a placeholder like ``tensor``: a placeholder itself takes no layout."""
        whole = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        computed = whole.logical_or(whole) if tensor.dtype == torch.bool else whole + 0
        _C._xla_mark_sharding(computed, self._mesh.get_op_sharding(axes or (None,)))
        return computed

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        if tensor.device.type != "xla":
            tensor = self._laid_out(tensor, axes)
            _C._clear_pending_irs(str(torch_xla.device()))  # which makes a placeholder of it
        self.describe(tensor, "other", axes)
        return tensor

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not _pending():
            return self.place(tensor, (None,) * tensor.dim(), device)
        # in the middle of a step nothing may be cleared; what comes then, learning rates, needs no layout
        placeholder: torch.Tensor = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        return placeholder

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> DeviceLoader:
        return _PlaceholderLoader(batches, partial(self._upload_batch, batch_axes), self.step_boundary)

    def _upload_batch(self, batch_axes: tuple[str, ...], tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        axes: PartitionSpec = (None,) * tensor.dim()
        shards = shard_count(self._mesh, batch_axes)
        if tensor.dim() > 0 and shards > 1 and tensor.shape[0] % shards == 0:
            axes = (batch_axes, *axes[1:])
        placed = self.place(tensor, axes, device)
        self.describe(placed, "batch", axes)
        return placed

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    # ---- programs

    def step_boundary(self) -> None:
        pending = _pending()
        if not pending:
            return
        self.programs.append(self._record(pending))
        for tensor in pending:
            value = self._origin(tensor)
            self._values[_C._xla_get_tensor_id(tensor)] = value
            self._latest[_memory(tensor)] = _C._xla_get_tensor_id(tensor)
            if not _C._get_xla_sharding_spec(tensor):
                _C._xla_mark_sharding(tensor, value.sharding or self._mesh.get_op_sharding((None,)))
        _C._clear_pending_irs(str(torch_xla.device()))

    def _record(self, outputs: list[torch.Tensor]) -> Program:
        overwritten = {self._overwritten(tensor) for tensor in outputs}
        numbers, _ = _C._get_tensors_xla_device_data_node(outputs)
        return Program(
            _C._get_xla_tensors_hlo_proto(outputs),
            tuple(self._values.get(number, AbstractValue()) for number in numbers),
            tuple(number in overwritten for number in numbers),
        )

    def _overwritten(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor that ``tensor`` replaces, in place; its own number if there is none."""
        memory = _memory(tensor)
        return self._latest.get(memory, memory)

    def _origin(self, tensor: torch.Tensor) -> AbstractValue:
        """Return what a result stands for: what it replaces, or what has its layout, being like its only argument.

        The compiler would find out the same: it carries layouts on through operations on single elements.
        """
        if (value := self._values.get(self._overwritten(tensor))) is not None:
            return value
        numbers, arguments = _C._get_tensors_xla_device_data_node([tensor])
        like = [number for number, each in zip(numbers, arguments, strict=True) if each.shape == tensor.shape]
        value = self._values.get(like[0]) if len(like) == 1 else None
        return AbstractValue() if value is None else dataclasses.replace(value, kind="other")


class _PlaceholderLoader(DeviceLoader):
    """Batches of placeholders, with a boundary before each, as the `DeviceLoader` has one."""

    def __init__(self, batches: DataLoader, upload: Upload, boundary: Callable[[], None]) -> None:
        super().__init__(batches, upload)
        self._boundary = boundary

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            self._boundary()
            yield self._placed(batch)
        self._boundary()

    def _placed(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._placed(part) for key, part in value.items()}
        if hasattr(value, "map_tensors"):  # packed rows
            return value.map_tensors(self._placed)
        return self._upload(value, torch_xla.device()) if isinstance(value, torch.Tensor) else value


def write_kernels_for_libtpu() -> None:
    """Let jax write kernels that libtpu reads: on a TPU it asks for the version, elsewhere it writes its newest."""
    import jax._src.tpu_custom_call as kernels

    kernels.get_ir_version = lambda *_, **__: _KERNELS_VERSION


def _pending() -> list[torch.Tensor]:
    """Return every tensor that a boundary would compute, once, by number: in torch_xla's order."""
    found: dict[int, torch.Tensor] = {}
    for each in gc.get_objects():
        # type(), since isinstance would wake up lazy modules and proxies
        if issubclass(type(each), torch.Tensor) and each.device.type == "xla":
            found[_C._xla_get_tensor_id(each)] = each
    tensors = [found[number] for number in sorted(found)]
    needed = _C._check_tensor_need_materialization(tensors) if tensors else []
    return [tensor for tensor, is_needed in zip(tensors, needed, strict=True) if is_needed]


def _memory(tensor: torch.Tensor) -> int:
    """Return the number of the tensor whose memory it takes: its own, unless it was changed in place."""
    found = re.search(r"AliasID: (\d+)", _C._get_xla_tensor_debug_info(tensor))
    assert found is not None
    return int(found[1])
