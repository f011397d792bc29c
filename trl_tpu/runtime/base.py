"""Types that every runtime knows. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from ..errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

#: The mesh axis or axes that each dimension of a tensor goes over, None meaning none.
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]

#: How long processes wait for one that is busy: the first writes a large model to slow storage.
PATIENCE = timedelta(hours=2)

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
