"""Trace what a trainer would run on devices, without data: tensors have shapes only, and programs are kept, not run.

A tensor that would hold data is torch_xla's placeholder. Where the trainer would execute what it recorded, the program
is kept as HLO, and what it computed becomes placeholders too; so a whole run can be traced, of any size, on one host.
"""

import dataclasses
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.runtime as xr
from torch.utils.data import DataLoader

from ..runtime import PartitionSpec, Topology
from ..runtime.layout import shard_count
from ..runtime.xla import XlaRuntime

_C = torch_xla._XLAC
_KERNELS_VERSION = 6
"""That libtpu 0.0.21, torch_xla 2.9's, reads; it is written in a kernel, so that later ones read it too."""


@dataclass(frozen=True)
class Known:
    """What a placeholder stands for: a name, a kind such as "weight", and the mesh axes of each dimension.

    Numbers that torch_xla makes arguments itself have no name, and are "other".
    """

    name: str
    kind: str
    axes: PartitionSpec


@dataclass(frozen=True)
class Input:
    """One argument of a recorded program."""

    known: Known
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
        chips: Devices of the mesh, which may be more than torch_xla has: torch counts a backend's devices in eight
            bits, and of 128 and more it sees none.
        stop: Called with each program, in order; may raise to end the trace.
    """

    def __init__(self, chips: int, stop: Callable[[Program], None] = lambda program: None) -> None:
        self._chips, self._stop = chips, stop
        self._known: dict[int, Known] = {}
        self._holder: dict[int, int] = {}  # of each memory, by the number of its first tensor, the latest tensor's
        super().__init__()
        # which torch_xla asks when a mesh is made
        xr.global_runtime_device_count = lambda: self._chips  # type: ignore[assignment]

    def topology(self) -> Topology:
        return dataclasses.replace(super().topology(), local_positions=tuple(range(self._chips)))

    @cached_property
    def attention_kernel(self) -> Callable[..., torch.Tensor]:  # type: ignore[override]
        from ..runtime.kernels.splash import splash_attention

        write_kernels_for_libtpu()
        return splash_attention

    @property
    def has_attention_kernel(self) -> bool:
        return True

    # ---- tensors without data

    def know(self, tensor: torch.Tensor, name: str, kind: str, axes: PartitionSpec) -> None:
        """Say what ``tensor`` stands for."""
        self._known[_C._xla_get_tensor_id(tensor)] = Known(name, kind, axes)

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        if tensor.device.type != "xla":
            whole = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
            # a placeholder takes no layout, but what is computed from it does, and then becomes a placeholder
            tensor = whole.logical_or(whole) if tensor.dtype == torch.bool else whole + 0
            _C._xla_mark_sharding(tensor, self._sharding(axes))
            _C._clear_pending_irs(str(torch_xla.device()))
        self.know(tensor, "", "other", axes)
        return tensor

    def _sharding(self, axes: PartitionSpec) -> Any:
        return self._mesh.get_op_sharding(axes or (None,))

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not _pending():
            return self.place(tensor, (None,) * tensor.dim(), device)
        # in the middle of a step nothing may be cleared; what comes then, learning rates, needs no layout
        placeholder: torch.Tensor = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        return placeholder

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> "Batches":  # type: ignore[override]
        return Batches(batches, partial(self._batch, batch_axes), self.step_boundary)

    def _batch(self, batch_axes: tuple[str, ...], name: str, tensor: torch.Tensor) -> torch.Tensor:
        shards = shard_count(self._mesh, batch_axes)
        device = torch_xla.device()
        if tensor.dim() > 0 and shards > 1 and tensor.shape[0] % shards == 0:
            axes: PartitionSpec = (batch_axes, *([None] * (tensor.dim() - 1)))
            placed = self.place(tensor, axes, device)
        else:
            axes, placed = (None,) * tensor.dim(), self.to_device(tensor, device)
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
        program = self._record(pending)
        for tensor in pending:
            known = self._origin(tensor) or _unknown(tensor)
            self.know(tensor, known.name, known.kind, known.axes)
            self._holder[_memory(tensor)] = _C._xla_get_tensor_id(tensor)
            if not _C._get_xla_sharding_spec(tensor):
                _C._xla_mark_sharding(tensor, self._sharding(known.axes))
        _C._clear_pending_irs(str(torch_xla.device()))
        self._stop(program)

    def _record(self, outputs: list[torch.Tensor]) -> Program:
        overwritten = {self._overwritten(tensor) for tensor in outputs}
        ids, tensors = _C._get_tensors_xla_device_data_node(outputs)
        inputs = tuple(
            Input(self._known.get(number, _unknown(tensor)), tuple(tensor.shape), tensor.dtype, number in overwritten)
            for number, tensor in zip(ids, tensors, strict=True)
        )
        return Program(_C._get_xla_tensors_hlo_proto(outputs), inputs)

    def _overwritten(self, tensor: torch.Tensor) -> int:
        """The number of the tensor that ``tensor`` replaces, in place; its own number if there is none."""
        memory = _memory(tensor)
        return self._holder.get(memory, memory)

    def _origin(self, tensor: torch.Tensor) -> Known | None:
        """What a result stands for: what it replaces, or what it has the layout of, being like its only argument.

        The compiler would find out the same: it carries layouts on through operations on single elements.
        """
        known = self._known.get(self._overwritten(tensor))
        if known is not None:
            return known
        ids, arguments = _C._get_tensors_xla_device_data_node([tensor])
        like = [
            self._known.get(each) for each, other in zip(ids, arguments, strict=True) if other.shape == tensor.shape
        ]
        return Known("", "other", like[0].axes) if len(like) == 1 and like[0] is not None else None


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
        if hasattr(value, "map_tensors"):  # packed rows
            return value.map_tensors(partial(self._place, name))
        return self._place(name, value) if isinstance(value, torch.Tensor) else value


def write_kernels_for_libtpu() -> None:
    """Let jax write kernels that libtpu reads: on a TPU it asks for the version, elsewhere it writes its newest."""
    import jax._src.tpu_custom_call as kernels

    kernels.get_ir_version = lambda *_, **__: _KERNELS_VERSION


def _unknown(tensor: torch.Tensor) -> Known:
    return Known("", "other", (None,) * tensor.dim())


def _pending() -> list[torch.Tensor]:
    """Every tensor that a boundary would compute, once, by number: in torch_xla's order."""
    found: dict[int, torch.Tensor] = {}
    for each in gc.get_objects():
        # type(), since isinstance would wake up lazy modules and proxies
        if issubclass(type(each), torch.Tensor) and each.device.type == "xla":
            found[_C._xla_get_tensor_id(each)] = each
    tensors = [found[number] for number in sorted(found)]
    needed = _C._check_tensor_need_materialization(tensors) if tensors else []
    return [tensor for tensor, is_needed in zip(tensors, needed, strict=True) if is_needed]


def _memory(tensor: torch.Tensor) -> int:
    """The number of the tensor whose memory it takes: its own, unless it was changed in place."""
    found = re.search(r"AliasID: (\d+)", _C._get_xla_tensor_debug_info(tensor))
    assert found is not None
    return int(found[1])
