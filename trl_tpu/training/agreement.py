"""What each of several hosts loads and decides, as pure arithmetic: one process a host, no device is touched.

Under SPMD all processes run the same program. So every host must take the same step, evaluation, save and stop, with
batches of the same shapes, or all wait for one another forever.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..parallel.mesh import MeshShape


@dataclass(frozen=True)
class Host:
    """One of ``count`` hosts that train together.

    Args:
        index: Which it is.
        count: How many there are.
        positions: Where in the mesh, last axis fastest, its devices are. They need not follow one another: chips are
            numbered through their grid, of which a host has a block, and several slices are put in an order of theirs.

    Raises:
        ValueError: If there is no such host.
    """

    index: int = 0
    count: int = 1
    positions: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"Of {self.count} host(s), host {self.index} does not exist: indices begin at 0.")

    @property
    def speaks(self) -> bool:
        """Whether this host logs, writes what all hosts share, and pushes to the Hub: the first, for all."""
        return self.index == 0

    def rows(self, count: int, mesh: MeshShape) -> np.ndarray:
        """The rows that this host's devices hold of a batch of ``count`` rows, ascending.

        Rows go over the batch axes, inside of which is `tensor`: devices that differ in it alone hold the same rows,
        also when they are on several hosts. A batch that the axes do not divide is whole on every device.
        """
        if count % mesh.batch_shards:
            return np.arange(count)
        each = count // mesh.batch_shards
        parts = sorted({position // mesh.tensor for position in self.positions})
        return np.concatenate([np.arange(part * each, (part + 1) * each) for part in parts])


def agreed(wishes: Iterable[tuple[bool, ...]]) -> tuple[bool, ...]:
    """What all hosts do, of what each wishes, decision by decision: what any of them wishes.

    A host that saved, evaluated or stopped alone would leave the others waiting for it in their next collective.
    """
    return tuple(any(votes) for votes in zip(*wishes, strict=True))


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse hosts that were started with different arguments, data or checkpoints.

    Args:
        runs: Of each host, what has to be the same everywhere.

    Raises:
        ValueError: Names everything that differs, and each host's value.
    """
    faults = []
    for name in runs[0]:
        hosts_of: dict[str, list[int]] = {}
        for host, run in enumerate(runs):
            hosts_of.setdefault(json.dumps(run[name], default=str), []).append(host)
        if len(hosts_of) > 1:
            faults.append(f"{name} is " + " and ".join(f"{value} on {_named(on)}" for value, on in hosts_of.items()))
    if faults:
        raise ValueError(
            f"All hosts must train the same run, but {'; '.join(faults)}. Start the same command on every host, with "
            "the same data, and an output_dir that all of them share."
        )


def _named(hosts: list[int]) -> str:
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts[:8]))}{more}"
