"""What is to be trained, before it is said on what and how: cases of it are made for slices, meshes and policies."""

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Any, Protocol

import numpy as np

from ..packing.schedule import plan_rows
from ..parallel.mesh import MeshShape
from ..parallel.rules import Rules
from ..parallel.shard import plan_model
from ..parallel.sharding_plan import Placement
from .analytic import ModelShape, read_model
from .case import Case
from .chips import Topology
from .lengths import PairLengths

# rows of this length and more attend by a kernel on a TPU, see `trl_tpu.trainer.batch_plan`
LONG_ROW = 2048


def attends_by_kernel(packed_attention: str, longest_row: int) -> bool:
    """Whether packed rows attend without a score for each query and key, where the model allows it."""
    return packed_attention == "expanded" or (packed_attention == "auto" and longest_row >= LONG_ROW)


class Batching(Protocol):
    """Which rows the batches of a run have."""

    def rows(self, pairs: int, parts: int) -> tuple[int, int]:
        """Rows, and their length, of a pass of ``pairs`` pairs that goes over ``parts`` parts of the mesh."""

    def lengths(self, pairs: int) -> PairLengths:
        """The pairs of such a pass."""

    def __str__(self) -> str:
        """What this rests on, for the report."""


@dataclass(frozen=True)
class FullRows:
    """Rows without padding: pairs of one size, several to a row."""

    length: int
    pairs_per_row: float = 1.0

    def rows(self, pairs: int, parts: int) -> tuple[int, int]:
        return ceil(pairs / self.pairs_per_row / parts) * parts, self.length

    def lengths(self, pairs: int) -> PairLengths:
        return PairLengths.alike(pairs, self.size)

    @property
    def size(self) -> int:
        """Unique tokens of a pair."""
        return int(self.length // max(self.pairs_per_row, 1.0))

    def __str__(self) -> str:
        return (
            f"No data is named: every pair is taken to have {self.size:,} unique tokens, half of them prompt and a "
            "quarter in each answer, and rows to be full."
        )


@dataclass(frozen=True)
class PaddedRows:
    """A row for each dialogue, all of one length: what a batch is without packing."""

    length: int

    def rows(self, pairs: int, parts: int) -> tuple[int, int]:
        return 2 * pairs, self.length

    def lengths(self, pairs: int) -> PairLengths:
        answer = max(1, self.length // 4)
        return PairLengths.of([(self.length - answer, answer, answer)] * pairs)

    def __str__(self) -> str:
        return (
            f"Without packing, every dialogue is taken to have {self.length:,} tokens, three quarters of them prompt. "
            "The prompt is computed twice, but needed once."
        )


@dataclass(frozen=True)
class DataRows:
    """Rows as the trainer plans them from its data.

    Args:
        pairs: All of the dataset.
        settings: Of `plan_rows`.
        attention: As `RewardConfig.packed_attention`.
    """

    pairs: PairLengths
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"

    def rows(self, pairs: int, parts: int) -> tuple[int, int]:
        plan = plan_rows(self.pairs.sizes_P, pairs, parts, **self.settings)
        if attends_by_kernel(self.attention, plan.longest):
            plan = plan_rows(self.pairs.sizes_P, pairs, parts, **self.settings | {"shared_prefix": 0, "multiple": 256})
        largest = max(plan.shapes, key=lambda shape: shape.work(plan.attention_crossover_length))
        return largest.rows, largest.length

    def lengths(self, pairs: int) -> PairLengths:
        drawn_P = np.random.default_rng(0).integers(0, len(self.pairs), pairs)
        return PairLengths(self.pairs.prefix_P[drawn_P], self.pairs.chosen_P[drawn_P], self.pairs.rejected_P[drawn_P])

    def __str__(self) -> str:
        sizes_P = self.pairs.sizes_P
        return (
            f"Lengths of {len(sizes_P):,} pairs of the dataset: {sizes_P.mean():,.0f} unique tokens on average, "
            f"{sizes_P.max():,} at most. Compiled is the largest of the shapes that they are packed in."
        )


@dataclass(frozen=True)
class Job:
    """A model and its data.

    Args:
        model: On torch's meta device, with its adapters.
        rules: A sharding plan of the user's own.
        notes: More to say in reports.
    """

    model: Any
    batching: Batching
    rules: Rules | None = None
    compute_bytes: int = 2
    optim: str = "adamw_torch"
    accumulation: int = 1
    masks: bool = False
    notes: tuple[str, ...] = ()
    _placements: dict[MeshShape, dict[str, Placement]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def shape(self) -> ModelShape:
        return read_model(self.model)

    def placements(self, mesh: MeshShape) -> dict[str, Placement]:
        """Where each weight goes.

        Raises:
            UserError: If the mesh does not fit the model.
        """
        if mesh not in self._placements:
            plan = plan_model(self.model, mesh, self.rules)
            self._placements[mesh] = {
                weight.name: plan.place(weight.name, weight.shape) for weight in self.shape.weights
            }
        return self._placements[mesh]

    def case(self, topology: Topology, mesh: MeshShape, remat: str, pairs_per_part: int) -> Case:
        """The case of training it so.

        Args:
            pairs_per_part: `per_device_train_batch_size`.

        Raises:
            UserError: If the mesh does not fit the model.
        """
        pairs = pairs_per_part * mesh.batch_shards
        rows, length = self.batching.rows(pairs, mesh.batch_shards)
        return Case(
            topology=topology,
            mesh=mesh,
            model=self.shape,
            placements=self.placements(mesh),
            pairs=pairs,
            rows=rows,
            length=length,
            lengths=self.batching.lengths(pairs),
            remat=remat,
            compute_bytes=self.compute_bytes,
            optim=self.optim,
            accumulation=self.accumulation,
            masks=self.masks,
        )


__all__ = ["LONG_ROW", "Batching", "DataRows", "FullRows", "Job", "PaddedRows", "attends_by_kernel"]
