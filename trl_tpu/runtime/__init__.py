"""The one seam to the accelerator: everything that differs between PyTorch/XLA and plain torch goes through here.

``choice()`` decides once per process and says why; ``current()`` is the chosen `Runtime`. Only this package imports
torch_xla, and only when it is chosen.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:
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
    def parse(cls, value: str) -> "Remat":
        """Read what a user writes.

        Raises:
            ValueError: If it is none of the three.
        """
        if value not in list(cls):
            raise ValueError(f"remat must be 'full', 'dots' or 'none', got {value!r}.")
        return cls(value)


@dataclass(frozen=True)
class Choice:
    """Which runtime trains, and the reason, for the log."""

    name: Literal["xla", "native"]
    reason: str


@cache
def choice() -> Choice:
    """Decide between PyTorch/XLA and plain torch by the rule that transformers and accelerate use, so all three agree.

    XLA where torch_xla is installed, unless the environment says ``USE_TORCH_XLA=0``.
    """
    if os.environ.get("USE_TORCH_XLA", "1").upper() not in ("1", "ON", "YES", "TRUE"):
        return Choice("native", f"USE_TORCH_XLA={os.environ['USE_TORCH_XLA']} turns PyTorch/XLA off")
    if importlib.util.find_spec("torch_xla") is None:
        return Choice("native", "torch_xla is not installed")
    return Choice("xla", "torch_xla is installed (USE_TORCH_XLA=0 would turn it off)")


class Runtime(Protocol):
    """What the trainer needs of a device. Two implementations: `XlaRuntime` and `NativeRuntime`."""

    name: str
    """For messages; what differs is asked of the capabilities."""

    compiles: bool
    """Whether steps are recorded and compiled: shapes have to be static, and reading a value stops the device."""

    shares_mesh: bool
    """Whether one process drives all devices of its host and all processes form one mesh, which this runtime leads.

    Else a process has one device, and accelerate leads the processes.
    """

    def start(self) -> None:
        """Get ready before anything touches a device (XLA: turn SPMD on). May be called many times."""

    def device_count(self) -> int:
        """How many devices one process drives as a mesh."""

    def process_index(self) -> int:
        """Which of the processes that share one mesh this is: on a pod there is one a host."""

    def process_count(self) -> int:
        """How many processes share one mesh."""

    def local_positions(self) -> tuple[int, ...]:
        """Where in the mesh, last axis fastest, the devices of this process are, ascending."""

    def barrier(self) -> None:
        """Wait until all processes of the mesh are here."""

    def all_gather_object(self, value: Value, while_saving: bool = False) -> list[Value]:
        """What each process of the mesh says, in their order. For small values; all processes take part.

        Threads that write a checkpoint ask ``while_saving``, so that their words are not taken for those of training.
        """

    def hardware(self) -> str:
        """What the devices are, for the log."""

    def seed(self, seed: int) -> None:
        """Seed the device's random numbers, where transformers' ``set_seed`` does not."""

    def slice_count(self) -> int:
        """In how many slices, which a slower network joins, the devices are."""

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        """Arrange all devices as a mesh of named axes, whose sizes multiply to `device_count`.

        The first axis goes over the ``slices``.

        Raises:
            ValueError: The devices are in another number of slices.
        """

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        """``tensor`` on the device, laid out over the mesh: dimension d over the axes ``axes[d]``, None meaning whole.

        A host tensor goes to its shards directly; a device tensor is laid out in place.
        """

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        """The activation ``tensor``, and its gradient, laid out as in `place`; the compiler has to see to it.

        Axes that do not divide their dimension are left out.
        """

    def scatter(self, gradient: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        """``gradient`` on its way to where its weight is, laid out by ``axes`` over `fsdp`: how it is added up.

        Where the compiler would not scatter it over so many devices at once, it is laid out over some of them. What is
        laid out already stays so.
        """

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let nothing be computed from any of ``tensors``, in place, before all of them are there."""

    def autocast(self, dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
        """Matrix multiplications in ``dtype`` over float32 weights; None changes nothing."""

    def attention(
        self,
        q_RHLD: torch.Tensor,
        k_RGLD: torch.Tensor,
        v_RGLD: torch.Tensor,
        rows: "KernelRows",
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention by the device's best kernel, equal to `kernels.attend_in_rows`."""

    def has_attention_kernel(self) -> bool:
        """Whether `attention` needs less memory than a mask for each query and key."""

    def shard_map(
        self,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
        axes: Sequence[PartitionSpec],
        result_axes: PartitionSpec,
    ) -> torch.Tensor:
        """``function(*tensors)``, each device computing its own part of the result from its own parts of the tensors.

        For functions of which the compiler would not see that the parts are independent.

        Args:
            function: Right for any part. It is given parts, and returns one.
            axes: The mesh axes that each dimension of each tensor goes over. An axis that does not divide every
                dimension that it is named for is left out.
            result_axes: The same of the result.
        """

    def recompute_layers(self, model: nn.Module, policy: Remat) -> None:
        """Make layers that transformers marked for activation checkpointing recompute in a way the device supports.

        With "dots" they keep what their matrix products return.
        """

    def divide(self, block: nn.Module, last: str, axes: Mapping[str, PartitionSpec]) -> None:
        """Let the backward of a feed-forward block take its features in parts where its weights, gathered, are large.

        Everywhere it rounds the gradient of what the last product takes as soon as that is made.

        Args:
            block: Products of its input with one or more weights, a function of single features of what they give,
                and a product of that with a last weight, without a bias. It has no other parameters.
            last: The name of the module that makes the last product.
            axes: Of each parameter, by name, the mesh axes that its dimensions go over; `tensor` is none of them.
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
        """``hidden`` after layers that are alike, as a loop whose program has one of them.

        Args:
            layer: One layer, whose parameters have those of all layers behind a first dimension.
            axes: Of each parameter of one layer, the mesh axes that its dimensions go over.
            policy: "full" or "dots", see `Remat`.
            args, kwargs: What each layer gets besides; no gradient goes to tensors in them.
        """

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> Iterable[dict[str, Any]]:
        """Move ``batches`` to the device ahead of need; a batch's first dimension goes over ``batch_axes``.

        Every process gives batches of all rows, and uploads those of its own devices; the others may hold anything.
        """

    def step_boundary(self) -> None:
        """End the recorded step: what was computed since the last boundary becomes one execution."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A small host tensor as data on the device. Rank 1 or more: XLA bakes scalars 0 and 1 into the program."""

    def replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor whole on every device, in the recorded step itself, so that fetching it needs no new program."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Device tensors as host tensors, in one stop of the device."""

    def to_host(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict as host tensors, put together from shards; tied tensors stay tied. All processes take part."""

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Host copies of named tensors, of each the parts that this process's devices hold; of tied tensors one."""

    def join_shards(self, snapshot: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a snapshot, where one process has all parts; tied tensors stay tied."""

    def index_shards(self, part: Any, index: int) -> Any:
        """Of a tensor of a snapshot, its ``index`` in the first dimension, which is over no axes. No copy."""

    def write(self, snapshot: Mapping[str, Any], folder: Path) -> None:
        """Write a snapshot as safetensors, each process its own parts. All processes take part, from any thread."""

    def read(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Read what any runtime on any mesh wrote into tensors, which keep their layout. All processes take part."""

    def compile_count(self) -> int:
        """How many programs were compiled so far (0 where nothing compiles)."""


_replacement: Runtime | None = None


def replace(runtime: Runtime) -> None:
    """Let ``runtime`` be this process's: for tracing programs, before anything trains."""
    global _replacement
    _replacement = runtime
    current.cache_clear()


@cache
def current() -> Runtime:
    """The runtime of this process."""
    if _replacement is not None:
        return _replacement
    if choice().name == "xla":
        from .xla import XlaRuntime

        return XlaRuntime()
    from .native import NativeRuntime

    return NativeRuntime()
