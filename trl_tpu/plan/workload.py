"""Workloads, which are a model with its data and settings, and layouts of a workload on one slice."""

from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, prod
from typing import Any

from datasets import Dataset

from ..batching.batch_plan import LONG_ROW
from ..batching.planned_shapes import plan_rows_of
from ..config.reward_config import RewardConfig
from ..data.measure import PAIR, has_form, measure
from ..modeling.adapters import without_adapters
from ..modeling.model_shape import ModelShape, read_model
from ..packing.lengths import PairLengths
from ..packing.shapes import round_up
from ..parallel.chips import Topology
from ..parallel.mesh import MeshShape
from ..parallel.shard import plan_model
from ..parallel.sharding_plan import Placement
from ..runtime import Remat


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its data, and the settings that are the same on every slice.

    Args:
        module: The model on torch's meta device, with its adapters.
        args: The settings of the training; mesh, remat policy and batch size are a layout's own.
        lengths: The pairs of the dataset, or one that stands for all.
        tokens: The dataset's pairs of token ids; None where none is named, and rows are taken to be full.
    """

    module: Any
    args: RewardConfig
    lengths: PairLengths
    tokens: Dataset | None = None

    @cached_property
    def model(self) -> ModelShape:
        return read_model(self.module)

    @property
    def config(self) -> Any:
        """The model's config."""
        return without_adapters(self.module).config

    @property
    def basis(self) -> str:
        """A sentence on where the lengths come from."""
        sizes_P = self.lengths.sizes_P
        source = "No data is named, so the lengths are assumed" if self.tokens is None else "Lengths of the dataset"
        return f"{source}: {len(sizes_P):,} pairs of {sizes_P.mean():,.0f} unique tokens, {sizes_P.max():,} at most."

    @property
    def is_packed(self) -> bool:
        return self.args.packing != "false"

    @property
    def answers(self) -> int | None:
        """The most answers that a prompt of rankings has, or steps a solution; two without data; None of pairs."""
        if self.tokens is None and (self.args.attributes or self.args.step_separator is not None):
            return 2
        is_many = self.tokens is not None and not has_form(self.tokens, PAIR)
        return measure(self.tokens).answers if is_many else None

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return 2 if self.args.bf16 else 4

    @cache  # noqa: B019  a workload lives as long as its command
    def placements(self, mesh: MeshShape) -> dict[str, Placement]:
        """Return where each of the model's weights goes on ``mesh``, by name.

        Raises:
            UserError: The mesh does not fit the model.
        """
        plan = plan_model(self.module, mesh, self.args.sharding_rules)
        return {each.name: plan.place(each.name, each.shape) for each in self.model.weights}

    @cache  # noqa: B019
    def shape(self, pairs: int, shards: int) -> tuple[int, int]:
        """Return the rows of the largest micro-batch of ``pairs`` pairs over ``shards`` shards, and their length."""
        if not self.is_packed:
            dialogues = 1 if self.args.step_separator is not None else self.answers or 2  # a solution is one
            return dialogues * pairs, int(self.lengths.longest_P.max())
        if self.tokens is None:
            size = int(self.lengths.sizes_P[0])
            length = self.args.row_length or int(round_up(size, 128))
            return ceil(pairs / (length // size) / shards) * shards, length
        plan = plan_rows_of(self.tokens, self.model.hidden, pairs, shards, self.args)
        if not self.attends_with_masks(plan.longest):
            plan = plan_rows_of(self.tokens, self.model.hidden, pairs, shards, self.args, expands=True, multiple=256)
        return max(((each.rows, each.length) for each in plan.shapes), key=prod)

    def attends_with_masks(self, length: int) -> bool:
        """Tell whether rows of ``length`` attend with a score for each query and key; else a kernel does it."""
        chosen = self.args.packed_attention
        has_to = not self.is_packed or self.answers is not None or chosen == "masks"
        return has_to or (chosen == "auto" and length < LONG_ROW)


def assumed_pair(args: RewardConfig) -> PairLengths:
    """Return a pair that stands for all where no data is named.

    Half of a dialogue of `max_length` is prompt, which packed rows hold once; in padded rows a dialogue fills a row.
    """
    if args.packing == "false":
        length = args.row_length or args.max_length or LONG_ROW
        return PairLengths.of_size(4 * length // 3)  # of which three quarters are a dialogue
    usual = args.max_length + args.max_length // 2 if args.max_length else LONG_ROW
    length = args.row_length or int(round_up(usual, 128))
    return PairLengths.of_size(length // max(1, length // usual))


@dataclass(frozen=True, eq=False)
class Layout:
    """One way to train a workload on one slice.

    Args:
        pairs_per_device: `per_device_train_batch_size`.
    """

    workload: Workload
    topology: Topology
    mesh: MeshShape
    remat: Remat
    pairs_per_device: int

    @cached_property
    def placements(self) -> dict[str, Placement]:
        return self.workload.placements(self.mesh)

    @property
    def pairs(self) -> int:
        """Pairs of a micro-batch, over all chips."""
        return self.pairs_per_device * self.mesh.batch_shards

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows of a micro-batch, over all chips, and their length."""
        return self.workload.shape(self.pairs, self.mesh.batch_shards)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, padding among them, over all chips."""
        return prod(self.shape)

    @property
    def tokens_per_shard(self) -> int:
        """Tokens of each shard of the batch, which the chips of a `tensor` axis share."""
        return self.tokens // self.mesh.batch_shards

    @cached_property
    def lengths(self) -> PairLengths:
        """The pairs of a micro-batch, as far as they are known."""
        return self.workload.lengths.drawn(self.pairs)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `RewardConfig` that choose it."""
        return {"mesh": str(self.mesh), "remat": self.remat, "per_device_train_batch_size": self.pairs_per_device}

    def __str__(self) -> str:
        rows, length = self.shape
        return f"mesh {self.mesh}, remat {self.remat}, {self.pairs} pairs in {rows} rows of {length}"
