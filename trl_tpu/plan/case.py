"""What is planned: a job, which is a model and its data, and the cases of it, each on one slice in one way."""

from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil
from typing import Any

from ..batching.batch_plan import LONG_ROW
from ..modeling.model_shape import ModelShape, read_model
from ..packing.lengths import PairLengths
from ..packing.schedule import plan_rows
from ..packing.shapes import round_up
from ..parallel.chips import Topology
from ..parallel.mesh import MeshShape
from ..parallel.rules import Rules
from ..parallel.shard import plan_model
from ..parallel.sharding_plan import Placement
from ..runtime import Remat


@dataclass(frozen=True, eq=False)
class Job:
    """A model, its data, and what of the training is the same on every slice.

    Args:
        module: The model on torch's meta device, with its adapters.
        lengths: The pairs of the dataset, or one that stands for all.
        basis: What the lengths rest on, in words.
        notes: More to say in a report.
        is_packed: Whether a row holds whole pairs, or one dialogue.
        packed_attention: As in `RewardConfig`.
        row_settings: As for `plan_rows`.
        rules: A sharding plan of the user's own.
        compute_bytes: Of a number in matrix products: 2 for bfloat16.
        optim: The optimizer, by transformers' name.
        accumulation: Passes a step.
    """

    module: Any
    lengths: PairLengths
    basis: str = ""
    notes: tuple[str, ...] = ()
    is_packed: bool = True
    packed_attention: str = "auto"
    row_settings: dict[str, Any] = field(default_factory=dict)
    rules: Rules | None = None
    compute_bytes: int = 2
    optim: str = "adamw_torch"
    accumulation: int = 1

    @cached_property
    def model(self) -> ModelShape:
        return read_model(self.module)

    @cache  # noqa: B019  a job lives as long as its command
    def placements(self, mesh: MeshShape) -> dict[str, Placement]:
        """Where each of the model's weights goes on ``mesh``, by name.

        Raises:
            UserError: If the mesh does not fit the model.
        """
        plan = plan_model(self.module, mesh, self.rules)
        return {each.name: plan.place(each.name, each.shape) for each in self.model.weights}

    @cache  # noqa: B019
    def shape(self, pairs: int, parts: int) -> tuple[int, int]:
        """The largest shape of a pass of ``pairs`` pairs over ``parts`` parts of the mesh: rows, and their length."""
        sizes_N = self.lengths.sizes_P
        if not self.is_packed:
            return 2 * pairs, self.lengths.longest_dialogue
        if len(sizes_N) == 1:  # full rows
            length = self.row_settings.get("row_length") or int(round_up(int(sizes_N[0]), 128))
            return ceil(pairs / (length // int(sizes_N[0])) / parts) * parts, length
        plan = plan_rows(sizes_N, pairs, parts, **self.row_settings)
        if not self.keeps_scores(plan.longest):
            plan = plan_rows(sizes_N, pairs, parts, **self.row_settings | {"shared_prefix": 0, "multiple": 256})
        largest = max(plan.shapes, key=lambda each: each.work(plan.attention_crossover_length))
        return largest.rows, largest.length

    def keeps_scores(self, length: int) -> bool:
        """Whether attention in rows of ``length`` keeps a score for each query and key; else a kernel computes it."""
        kernel = self.packed_attention == "expanded" or (self.packed_attention == "auto" and length >= LONG_ROW)
        return not (self.is_packed and kernel)


@dataclass(frozen=True, eq=False)
class Case:
    """One way to train, on one slice.

    Args:
        pairs_per_part: `per_device_train_batch_size`.
    """

    job: Job
    topology: Topology
    mesh: MeshShape
    remat: Remat
    pairs_per_part: int

    @cached_property
    def placements(self) -> dict[str, Placement]:
        return self.job.placements(self.mesh)

    @property
    def available(self) -> int:
        """Bytes of a chip's memory."""
        return self.topology.chip.memory

    @property
    def pairs(self) -> int:
        """Pairs of a pass, over all chips."""
        return self.pairs_per_part * self.mesh.batch_shards

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows of a pass, over all chips, and their length."""
        return self.job.shape(self.pairs, self.mesh.batch_shards)

    @cached_property
    def lengths(self) -> PairLengths:
        """The pairs of a pass, as far as they are known."""
        return self.job.lengths.drawn(self.pairs)

    @property
    def masks(self) -> bool:
        """Whether attention keeps a score for each query and key."""
        return self.job.keeps_scores(self.shape[1])

    @property
    def columns(self) -> int:
        """Tokens of a pass, padding among them, over all chips."""
        return self.shape[0] * self.shape[1]

    @property
    def columns_per_part(self) -> int:
        """Those of each part of the batch, which the chips of a `tensor` axis share."""
        return self.columns // self.mesh.batch_shards

    def as_json(self) -> dict[str, Any]:
        rows, length = self.shape
        sizes = {"pairs": self.pairs, "rows": rows, "row_length": length}
        return {"topology": str(self.topology), "mesh": self.mesh.sizes, "remat": self.remat} | sizes

    def __str__(self) -> str:
        rows, length = self.shape
        return f"mesh {self.mesh}, remat {self.remat}, {self.pairs} pairs in {rows} rows of {length}"
