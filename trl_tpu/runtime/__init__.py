"""The one seam to the accelerator: everything that differs between PyTorch/XLA and plain torch goes through here.

``choice()`` says which of them was chosen and why; ``current()`` is the chosen `Runtime`. Only this package imports
torch_xla, and only when it is chosen. Importing it imports no torch, nor anything else of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import UserError
from .device_choice import Choice, choice

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
    from torch.utils.data import DataLoader

    from .kernels.plain import KernelRows

#: The mesh axis or axes that each dimension of a tensor goes over, None meaning none.
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]

Value = TypeVar("Value")


class Remat(StrEnum):
    """What a layer's backward computes again: nothing, all, or all but its matrix products."""

    NONE = "none"
    FULL = "full"
    DOTS = "dots"

    @classmethod
    def parse(cls, value: str) -> Remat:
        """Read what a user writes.

        Raises:
            UserError: If it is none of the three.
        """
        if value not in list(cls):
            raise UserError(f"remat must be 'full', 'dots' or 'none', got {value!r}.")
        return cls(value)


@dataclass(frozen=True)
class Topology:
    """The devices and processes that train together."""

    devices: int
    """All devices of the mesh."""
    slices: int
    """Groups of devices that a slower network joins."""
    process_index: int
    process_count: int
    """Processes that share the mesh: on a pod there is one a host."""
    local_positions: tuple[int, ...]
    """Where in the mesh, last axis fastest, the devices of this process are, ascending."""
    description: str
    """What the devices are, for the log."""


@dataclass(frozen=True)
class Planners:
    """What torch's distributed checkpoints need of a device; each is None where torch's own default will do."""

    save: SavePlanner | None = None
    """Takes the values of `Runtime.local_shards`."""
    load: LoadPlanner | None = None
    """Takes tensors on the devices, and fills each device's own part."""
    group: ProcessGroup | None = None
    """The processes that write and read together, from any thread; None for one process by itself."""


class Runtime(Protocol):
    """What the trainer needs of a device. Two implementations: `XlaRuntime` and `NativeRuntime`.

    Making one gets ready whatever has to be before anything touches a device.
    """

    name: str
    """For messages; what differs is asked of the capabilities."""

    compiles: bool
    """Whether steps are recorded and compiled: shapes have to be static, and reading a value stops the device."""

    shares_mesh: bool
    """Whether one process drives all devices of its host and all processes form one mesh, which this runtime leads.

    Else a process has one device, and accelerate leads the processes.
    """

    @property
    def has_attention_kernel(self) -> bool:
        """Whether `attention` needs less memory than a mask for each query and key."""

    # ---- devices and processes

    def topology(self) -> Topology:
        """Return the devices and processes that train together, as they are now."""

    def all_gather_object(self, value: Value, while_saving: bool = False) -> list[Value]:
        """Return what each process of the mesh gives, in their order. Of None it is a barrier.

        All processes take part, with small values. Threads that write a checkpoint ask ``while_saving``, so that their
        words are not taken for those of training.
        """

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        """Arrange all devices as a mesh of named axes, whose sizes multiply to `Topology.devices`.

        The first axis goes over the ``slices``.

        Raises:
            UserError: The devices are in another number of slices.
        """

    # ---- layouts

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        """Lay ``tensor`` out on the device over the mesh: dimension d over the axes ``axes[d]``, None meaning whole.

        A host tensor goes to its shards directly; a device tensor is laid out in place.
        """

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        """Return the activation ``tensor`` laid out as by `place`, and its gradient too, by the compiler.

        Axes that do not divide their dimension are left out.
        """

    def scatter(self, gradient: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        """Return ``gradient`` on its way to where its weight is, laid out by ``axes`` over `fsdp`: how it is added up.

        Where the compiler would not scatter it over so many devices at once, it is laid out over some of them. What is
        laid out already stays so.
        """

    def shard_map(
        self,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
        axes: Sequence[PartitionSpec],
        result_axes: PartitionSpec,
    ) -> torch.Tensor:
        """Call ``function(*tensors)`` on each device with its own parts of the tensors, for its part of the result.

        For functions of which the compiler would not see that the parts are independent.

        Args:
            function: Right for any part. It is given parts, and returns one.
            axes: The mesh axes that each dimension of each tensor goes over. An axis that does not divide every
                dimension that it is named for is left out.
            result_axes: The same of the result.
        """

    # ---- to and from the host

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a small host tensor to the device, as data.

        It has one dimension or more: XLA makes scalars 0 and 1 constants of the program.
        """

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return small device tensors as host tensors, in one stop of the device."""

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Copy the parts of named tensors that this process's devices hold to the host, of tied tensors once.

        Returns:
            For each tensor its shards: ``shards[index]`` are those of its ``index`` in the first dimension, if that is
            over no axes, and ``shards.join()`` is the whole tensor, if this process has all of it. A tensor that has
            no shards is a host tensor itself.
        """

    def checkpoint_planners(self) -> Planners:
        """Return what torch's distributed checkpoints need to write `local_shards` and to read device tensors."""

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> Iterable[dict[str, Any]]:
        """Move ``batches`` to the device ahead of need; a batch's first dimension goes over ``batch_axes``.

        Every process gives batches of all rows, and copies those of its own devices; the others may hold anything.
        """

    # ---- steps

    def step_boundary(self) -> None:
        """End the recorded step: what was computed since the last boundary becomes one execution."""

    def compile_count(self) -> int:
        """Return how many programs were compiled so far (0 where nothing compiles)."""

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let nothing be computed from any of ``tensors``, in place, before all of them are there."""

    def recompute_layers(self, model: nn.Module, policy: Remat) -> None:
        """Make layers that transformers marked for activation checkpointing recompute in a way the device supports.

        With "dots" they keep what their matrix products return.
        """

    def scan(
        self,
        layer: nn.Module,
        axes: Mapping[str, PartitionSpec],
        policy: Remat,
        hidden: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return ``hidden`` after layers that are alike, as a loop whose program has one of them.

        Args:
            layer: One layer, whose parameters have those of all layers behind a first dimension.
            axes: The mesh axes that the dimensions of each parameter of one layer go over.
            policy: "full" or "dots", see `Remat`.
            args, kwargs: What each layer gets besides; no gradient goes to tensors in them.
        """

    def attention(
        self,
        q_RHLD: torch.Tensor,
        k_RGLD: torch.Tensor,
        v_RGLD: torch.Tensor,
        rows: KernelRows,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Compute attention by the device's best kernel, equal to `kernels.plain.attend_in_rows`."""


_replacement: Runtime | None = None


def replace(runtime: Runtime) -> None:
    """Let ``runtime`` be this process's: for tracing programs, before anything trains."""
    global _replacement
    _replacement = runtime
    current.cache_clear()


@cache
def current() -> Runtime:
    """Return the runtime of this process, which the first call makes ready.

    Raises:
        RuntimeError: A device was used before that this runtime cannot share.
    """
    if _replacement is not None:
        return _replacement
    if choice().name == "xla":
        from .xla import XlaRuntime

        return XlaRuntime()
    from .native import NativeRuntime

    return NativeRuntime()


__all__ = [
    "Choice",
    "PartitionSpec",
    "Planners",
    "Remat",
    "Runtime",
    "Topology",
    "Value",
    "choice",
    "current",
    "replace",
]
