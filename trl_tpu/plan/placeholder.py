"""Trace a trainer's programs without data: tensors have only shapes, and programs are kept instead of executed.

Tensors that would hold data are placeholders of torch_xla. Where the trainer would execute a recorded program, this
runtime keeps the program as HLO, and its results become placeholders. A run of any size can be traced on one host.
Use this module only in a separate process: it replaces a function of torch_xla and a function of jax.
"""

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.runtime as xr

from ..runtime import PartitionSpec
from ..runtime.xla import XlaRuntime
from .compile import TracedProgram

_C = torch_xla._XLAC
#: Kernel version that libtpu 0.0.21 reads, the libtpu of torch_xla 2.9. Later versions of libtpu read it, too.
_KERNELS_VERSION = 6


@dataclass(frozen=True)
class Sharding:
    """Sharding of a placeholder on the mesh; replicated by default.

    Attributes:
        op: The sharding as torch_xla's `OpSharding`; None for replicated.
        text: The sharding in HLO notation.
    """

    op: Any = None
    text: str = "{replicated}"

    @property
    def parts(self) -> int:
        """Number of different shards."""
        match = re.match(r"\{devices=\[([\d,]+)\]", self.text)
        sizes = [int(size) for size in match[1].split(",")] if match else []
        return prod(sizes[:-1] if "last_tile_dim_replicate" in self.text else sizes)


class PlaceholderRuntime(XlaRuntime):
    """A `Runtime` for PyTorch/XLA without data on its devices. It keeps programs, to compile them for TPUs later.

    Args:
        chips: Number of devices in the mesh. It may exceed torch_xla's number of devices: torch counts devices in
            eight bits, and sees none if there are 128 or more.
    """

    def __init__(self, chips: int) -> None:
        self.programs: list[TracedProgram] = []
        self._chips = chips
        self._shardings: dict[int, Sharding] = {}  # by tensor id
        self._latest: dict[int, int] = {}  # id of the latest tensor in each memory, by the id of the first one
        super().__init__()
        self._is_tpu = self.has_attention_kernel = True  # of the device to compile for
        # torch_xla calls this function when a mesh is made
        xr.global_runtime_device_count = lambda: self._chips  # type: ignore[assignment]

    def segment_attention(self, *tensors: Any) -> torch.Tensor:  # type: ignore[override]
        write_kernels_for_libtpu()
        return super().segment_attention(*tensors)

    # ---- tensors without data

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        # a placeholder cannot have a sharding: shard a tensor computed from it, and make that a placeholder
        placeholder = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        computed = placeholder.logical_or(placeholder) if tensor.dtype == torch.bool else placeholder + 0
        _C._xla_mark_sharding(computed, self._mesh.get_op_sharding(axes or (None,)))
        sharding = _sharding_of(computed)
        if tensor.device.type != "xla":
            tensor = computed
            _C._clear_pending_irs(str(torch_xla.device()))
        self._shardings[_C._xla_get_tensor_id(tensor)] = sharding
        return tensor

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not _pending_tensors(_live_tensors()):
            return self.place(tensor, (None,) * tensor.dim(), device)
        # within a step, pending operations must not be cleared; learning rates, sent then, need no sharding
        return xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    # ---- programs

    def step_boundary(self, wait: bool = False) -> None:
        tensors = _live_tensors()
        pending = _pending_tensors(tensors)
        if not pending:
            return
        self.programs.append(self._record(pending, tensors))
        for tensor in pending:
            sharding = self._sharding_of_result(tensor)
            self._shardings[_C._xla_get_tensor_id(tensor)] = sharding
            self._latest[_memory_id(tensor)] = _C._xla_get_tensor_id(tensor)
            if not _C._get_xla_sharding_spec(tensor):
                _C._xla_mark_sharding(tensor, sharding.op or self._mesh.get_op_sharding((None,)))
        _C._clear_pending_irs(str(torch_xla.device()))

    def _record(self, outputs: list[torch.Tensor], tensors: dict[int, torch.Tensor]) -> TracedProgram:
        overwritten = {self._overwritten_id(tensor) for tensor in outputs}
        ids, _ = _C._get_tensors_xla_device_data_node(outputs)
        idle = tensors.keys() - {*ids, *map(_C._xla_get_tensor_id, outputs)}
        return TracedProgram(
            hlo=_C._get_xla_tensors_hlo_proto(outputs),
            # torch_xla may add constants as arguments: they have no entry in `_shardings`
            shardings=tuple(self._shardings.get(number, Sharding()).text for number in ids),
            donated=tuple(number in overwritten for number in ids),
            chips=self._chips,
            idle=sum(tensors[n].nbytes // self._shardings.get(n, Sharding()).parts for n in idle),
        )

    def _overwritten_id(self, tensor: torch.Tensor) -> int:
        """Return the id of the tensor that ``tensor`` overwrites in place, or its own id."""
        memory = _memory_id(tensor)
        return self._latest.get(memory, memory)

    def _sharding_of_result(self, tensor: torch.Tensor) -> Sharding:
        """Return the sharding of the overwritten tensor, of the result itself, or of its only argument of equal shape.

        The compiler would infer the same: it propagates shardings through elementwise operations.
        """
        if (sharding := self._shardings.get(self._overwritten_id(tensor))) is not None:
            return sharding
        if _C._get_xla_sharding_spec(tensor):
            return _sharding_of(tensor)
        ids, arguments = _C._get_tensors_xla_device_data_node([tensor])
        alike = [number for number, argument in zip(ids, arguments, strict=True) if argument.shape == tensor.shape]
        return self._shardings.get(alike[0], Sharding()) if len(alike) == 1 else Sharding()


def write_kernels_for_libtpu() -> None:
    """Make jax write kernels in libtpu's version. Without a TPU, jax would write its newest version."""
    import jax._src.tpu_custom_call as kernels

    kernels.get_ir_version = lambda *_, **__: _KERNELS_VERSION


def _sharding_of(tensor: torch.Tensor) -> Sharding:
    return Sharding(_C._get_xla_op_sharding(tensor), _C._get_xla_sharding_spec(tensor))


def _live_tensors() -> dict[int, torch.Tensor]:
    """Return all tensors on the device by id, in the order of torch_xla."""
    # type() instead of isinstance(), because isinstance() would load lazy modules and proxies
    tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    on_device = {_C._xla_get_tensor_id(tensor): tensor for tensor in tensors if tensor.device.type == "xla"}
    return dict(sorted(on_device.items()))


def _pending_tensors(tensors: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a step boundary would compute."""
    needed = _C._check_tensor_need_materialization([*tensors.values()]) if tensors else []
    return [tensor for tensor, is_needed in zip(tensors.values(), needed, strict=True) if is_needed]


def _memory_id(tensor: torch.Tensor) -> int:
    """Return the id of the first tensor in the memory of ``tensor``: its own id unless it was changed in place."""
    match = re.search(r"AliasID: (\d+)", _C._get_xla_tensor_debug_info(tensor))
    assert match is not None
    return int(match[1])
