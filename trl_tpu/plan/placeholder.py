"""Trace what a trainer would run on devices, without data: tensors have shapes only, and programs are kept, not run.

A tensor that would hold data is torch_xla's placeholder. Where the trainer would execute what it recorded, the program
is kept as HLO, and what it computed becomes placeholders too; so a whole run can be traced, of any size, on one host.
This happens in a process of its own, in which two functions of libraries are replaced: of torch_xla and of jax.
"""

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.runtime as xr

from ..runtime import PartitionSpec
from ..runtime.layer_loop import OnHost
from ..runtime.xla import XlaRuntime
from .compile import TracedProgram

_C = torch_xla._XLAC
_KERNELS_VERSION = 6
"""That libtpu 0.0.21, torch_xla 2.9's, reads; it is written in a kernel, so that later ones read it too."""


@dataclass(frozen=True)
class Sharding:
    """The layout of a placeholder on the mesh: replicated, unless given."""

    op: Any = None
    """torch_xla's `OpSharding`; None is replicated."""
    text: str = "{replicated}"
    """The same in HLO's notation."""

    @property
    def parts(self) -> int:
        """The number of different shards."""
        found = re.match(r"\{devices=\[([\d,]+)\]", self.text)
        sizes = [int(size) for size in found[1].split(",")] if found else []
        return prod(sizes[:-1] if "last_tile_dim_replicate" in self.text else sizes)


class PlaceholderRuntime(XlaRuntime):
    """A `Runtime` for PyTorch/XLA with nothing on its devices, whose programs are kept to be compiled for TPUs.

    Args:
        chips: Devices of the mesh, which may be more than torch_xla has: torch counts a backend's devices in eight
            bits, and of 128 and more it sees none.
    """

    has_attention_kernel = True

    def __init__(self, chips: int) -> None:
        self.programs: list[TracedProgram] = []
        self._chips = chips
        self._shardings: dict[int, Sharding] = {}  # by the number of a tensor
        self._latest: dict[int, int] = {}  # of each memory, by the number of its first tensor, the latest tensor's
        super().__init__()
        # which torch_xla asks when a mesh is made
        xr.global_runtime_device_count = lambda: self._chips  # type: ignore[assignment]

    @cached_property
    def attention_kernel(self) -> Callable[..., torch.Tensor]:  # type: ignore[override]
        from ..runtime.splash import splash_attention

        write_kernels_for_libtpu()
        return splash_attention

    def activations_on_host(self) -> OnHost:
        return OnHost()

    # ---- tensors without data

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        # a placeholder takes no layout, but what is computed from it does, and then becomes a placeholder
        whole = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        computed = whole.logical_or(whole) if tensor.dtype == torch.bool else whole + 0
        _C._xla_mark_sharding(computed, self._mesh.get_op_sharding(axes or (None,)))
        sharding = _marked(computed)
        if tensor.device.type != "xla":
            tensor = computed
            _C._clear_pending_irs(str(torch_xla.device()))
        self._shardings[_C._xla_get_tensor_id(tensor)] = sharding
        return tensor

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not _pending(_live_tensors()):
            return self.place(tensor, (None,) * tensor.dim(), device)
        # in the middle of a step nothing may be cleared; what comes then, learning rates, needs no layout
        placeholder: torch.Tensor = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        return placeholder

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    # ---- programs

    def step_boundary(self) -> None:
        tensors = _live_tensors()
        pending = _pending(tensors)
        if not pending:
            return
        self.programs.append(self._record(pending, tensors))
        for tensor in pending:
            sharding = self._sharding_of_result(tensor)
            self._shardings[_C._xla_get_tensor_id(tensor)] = sharding
            self._latest[_memory(tensor)] = _C._xla_get_tensor_id(tensor)
            if not _C._get_xla_sharding_spec(tensor):
                _C._xla_mark_sharding(tensor, sharding.op or self._mesh.get_op_sharding((None,)))
        _C._clear_pending_irs(str(torch_xla.device()))

    def _record(self, outputs: list[torch.Tensor], tensors: dict[int, torch.Tensor]) -> TracedProgram:
        overwritten = {self._overwritten(tensor) for tensor in outputs}
        numbers, _ = _C._get_tensors_xla_device_data_node(outputs)
        idle = tensors.keys() - {*numbers, *map(_C._xla_get_tensor_id, outputs)}
        return TracedProgram(
            hlo=_C._get_xla_tensors_hlo_proto(outputs),
            # numbers that torch_xla makes arguments itself are not known here
            shardings=tuple(self._shardings.get(number, Sharding()).text for number in numbers),
            donated=tuple(number in overwritten for number in numbers),
            chips=self._chips,
            idle=sum(tensors[n].nbytes // self._shardings.get(n, Sharding()).parts for n in idle),
        )

    def _overwritten(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor that ``tensor`` replaces, in place; its own number if there is none."""
        memory = _memory(tensor)
        return self._latest.get(memory, memory)

    def _sharding_of_result(self, tensor: torch.Tensor) -> Sharding:
        """Return a result's own layout, or that of the tensor that it replaces, or of its only argument of its shape.

        The compiler would find out the same: it carries layouts on through operations on single elements.
        """
        if (sharding := self._shardings.get(self._overwritten(tensor))) is not None:
            return sharding
        if _C._get_xla_sharding_spec(tensor):
            return _marked(tensor)
        numbers, arguments = _C._get_tensors_xla_device_data_node([tensor])
        like = [number for number, each in zip(numbers, arguments, strict=True) if each.shape == tensor.shape]
        return self._shardings.get(like[0], Sharding()) if len(like) == 1 else Sharding()


def write_kernels_for_libtpu() -> None:
    """Let jax write kernels that libtpu reads: on a TPU it asks for the version, elsewhere it writes its newest."""
    import jax._src.tpu_custom_call as kernels

    kernels.get_ir_version = lambda *_, **__: _KERNELS_VERSION


def _marked(tensor: torch.Tensor) -> Sharding:
    return Sharding(_C._get_xla_op_sharding(tensor), _C._get_xla_sharding_spec(tensor))


def _live_tensors() -> dict[int, torch.Tensor]:
    """Return every tensor on the device, by number: in torch_xla's order."""
    found: dict[int, torch.Tensor] = {}
    for each in gc.get_objects():
        # type(), since isinstance would wake up lazy modules and proxies
        if issubclass(type(each), torch.Tensor) and each.device.type == "xla":
            found[_C._xla_get_tensor_id(each)] = each
    return dict(sorted(found.items()))


def _pending(tensors: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a boundary would compute."""
    needed = _C._check_tensor_need_materialization([*tensors.values()]) if tensors else []
    return [tensor for tensor, is_needed in zip(tensors.values(), needed, strict=True) if is_needed]


def _memory(tensor: torch.Tensor) -> int:
    """Return the number of the tensor whose memory it takes: its own, unless it was changed in place."""
    found = re.search(r"AliasID: (\d+)", _C._get_xla_tensor_debug_info(tensor))
    assert found is not None
    return int(found[1])
