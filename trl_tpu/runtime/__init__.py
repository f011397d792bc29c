"""The one seam to the accelerator: everything that differs between PyTorch/XLA and plain torch goes through here.

``choice()`` says which of them was chosen and why; ``current()`` is the chosen `Runtime`, which `native` defines as
plain torch is one, and `xla` extends. Only this package imports torch_xla, and only when it is chosen. Importing it
imports no torch, nor anything else of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UserError
from .device_choice import choice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

    from .native import Runtime

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
    from .native import Runtime

    return Runtime()


def __getattr__(name: str) -> Any:
    if name != "Runtime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .native import Runtime  # imports torch

    return Runtime
