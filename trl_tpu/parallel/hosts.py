"""What each of several hosts loads and decides, as pure arithmetic: one process a host, no device is touched.

The devices of a host follow one another in the mesh, as torch_xla numbers them, so with the axes of `mesh.AXES`, the
last one fastest, a host computes a run of the batch's rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .mesh import MeshShape


@dataclass(frozen=True)
class Host:
    """One of ``count`` hosts that train together.

    Raises:
        ValueError: If there is no such host.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"Of {self.count} host(s), host {self.index} does not exist: indices begin at 0.")

    @property
    def speaks(self) -> bool:
        """Whether this host logs, writes what all hosts share, and pushes to the Hub: the first, for all."""
        return self.index == 0

    def rows(self, count: int, mesh: MeshShape) -> slice:
        """The rows that this host's devices compute of ``count`` rows split over the batch axes.

        With a `tensor` axis larger than a host, several hosts compute the same rows.

        Raises:
            ValueError: The hosts cannot have equally many of the mesh's devices, or its batch parts equally many rows.
        """
        if mesh.devices % self.count:
            raise ValueError(
                f"mesh '{mesh}': {mesh.devices} devices / {self.count} hosts is no whole number, and every host has "
                "equally many devices."
            )
        if count % mesh.batch_shards:
            raise ValueError(f"mesh '{mesh}': {count} rows / {mesh.batch_shards} parts of a batch is no whole number.")
        own = mesh.devices // self.count
        first, last = self.index * own, (self.index + 1) * own - 1  # devices
        rows = count // mesh.batch_shards
        return slice(first // mesh.tensor * rows, (last // mesh.tensor + 1) * rows)

    def uploads_own_rows(self, mesh: MeshShape) -> bool:
        """Whether each host uploads only the rows of its own devices; otherwise every host uploads the whole batch.

        Own rows are dealt out to a host's devices one part each, in order: right where the batch is split over all
        devices of one slice. Elsewhere several devices share rows, or the slices' order decides which are whose.
        """
        return self.count > 1 and mesh.tensor == 1 and mesh.slices == 1


def agreed(wishes: Iterable[tuple[bool, ...]]) -> tuple[bool, ...]:
    """What all hosts do, of what each wishes, decision by decision: what any of them wishes.

    A host that saved, evaluated or stopped alone would leave the others waiting for it in their next collective.
    """
    return tuple(any(votes) for votes in zip(*wishes, strict=True))
