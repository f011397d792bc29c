"""Shapes of batches on a device that compiles each: rows of packed batches, and lengths of padded ones."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from ..config.reward_config import RewardConfig
from ..data.length_stats import PAIR, has_row_format, is_prepared, length_stats, length_stats_of_stream
from ..data.loader import sizes_by_prompt
from ..modeling.adapters import without_adapters
from ..modeling.model_shape import outgrows_positions
from ..modeling.packability import own_code_of, reads_padding
from ..modeling.static_shapes import ExpansionImpossible, use_expanded_attention
from ..modeling.tree_states import shared_chunk
from ..packing.shapes import PairLengths, RowPlan, attention_crossover_length, bucket_lengths, plan_rows, round_up
from ..runtime import Runtime

logger = logging.getLogger(__name__)

# below this, a mask for each query and key costs less than moving every layer's queries, keys and values
LONG_ROW = 2048

_BATCHES = 4096  # of which one has the longest pairs that a stream may have, so that shapes fit the others


def plan_rows_of(
    dataset: Any,
    hidden_size: int,
    pairs: int,
    shards: int,
    args: RewardConfig,
    expands: bool = False,
    multiple: int = 32,
    sizes_N: np.ndarray | None = None,
    chunk: int = 1,
) -> RowPlan:
    """Plan the rows in which batches of ``pairs`` pairs of ``dataset`` are packed.

    Args:
        expands: Whether attention reads rows of whole sequences: then what all sequences share takes room in each.
        multiple: Lengths are multiples of this.
        sizes_N: From `sizes_by_prompt`, or those of a stream, instead of sizes that are the pairs' own.
        chunk: See `RowPlan`.

    Raises:
        UserError: For too short a `row_length`.
    """
    shared_prefix = length_stats(dataset).shared_prefix if isinstance(dataset, Dataset) and not expands else 0
    plan = plan_rows(
        length_stats(dataset).lengths.in_chunks(chunk).sizes_P if sizes_N is None else sizes_N,
        pairs,
        shards,
        max_shapes=args.max_shapes,
        shared_prefix=shared_prefix // chunk * chunk,
        attention_crossover_length=attention_crossover_length(hidden_size),
        multiple=max(multiple, chunk),
        row_length=args.row_length,
    )
    return replace(plan, chunk=chunk)


class PlannedShapes:
    """The shapes of a run's batches, planned from the data's own lengths.

    Args:
        args: The run's settings.
        runtime: The devices' runtime.
        fixed_rows: Rows for every packed batch, instead of rows that fit the data.
    """

    expands = False
    """Whether packed rows attend in rows of whole sequences."""

    def __init__(self, args: RewardConfig, runtime: Runtime, fixed_rows: RowPlan | None) -> None:
        self._args, self._runtime, self._fixed_rows = args, runtime, fixed_rows
        self._plans: dict[tuple[str, int], RowPlan] = {}
        self._sizes_N: np.ndarray | None = None  # of training pairs, where `group_by_prompt` orders them
        self._streamed: PairLengths | None = None  # the first pairs of the first stream
        self._train_dataset: Any = None
        self._reads_padding: dict[str, bool] = {}  # by the user's own code in the model

    def use_model(self, model: PreTrainedModel, pad_token_id: int, is_packed: bool) -> None:
        """Plan for ``model``: the first one, or one that `model_init` made anew."""
        self._whole_model, self._model, self._pad_token_id = model, without_adapters(model), pad_token_id
        if is_packed and self.expands:
            use_expanded_attention(self._model)
        if not is_packed and self._runtime.plans_shapes:
            self._keeps_lengths()  # on the host still, where trying it compiles nothing

    def _keeps_lengths(self) -> bool:
        """Return whether batches keep TRL's lengths, as more padding gives other rewards.

        Some forwards of users' and learned prompts do; and so do positions that depend on the longest sequence.
        """
        own_code = own_code_of(self._whole_model)
        if own_code is not None and own_code not in self._reads_padding and not self._args.pad_to_multiple_of:
            self._reads_padding[own_code] = reads_padding(self._whole_model, self._pad_token_id)
            if self._reads_padding[own_code]:
                logger.warning(
                    f"Batches keep the length of their longest dialogue, each length compiled anew, since rewards "
                    f"change with padding: {own_code}. `pad_to_multiple_of` makes lengths few; as in TRL, it changes "
                    "rewards too."
                )
        reads = self._reads_padding.get(own_code or "", False)
        return reads or outgrows_positions(self._model, self._args.max_length)

    def prepare(self, train_dataset: Any, evaluated: Sequence[Any], is_packed: bool) -> None:
        """Plan the rows of prepared datasets; see `BatchPlan.prepare`."""
        self._train_dataset = train_dataset
        if self._args.group_by_prompt:
            self._sizes_N = sizes_by_prompt(train_dataset, self._pairs_together(self._args.train_batch_size))
        if not is_packed:
            return
        # an expansion holds two sequences of a row
        if all(has_row_format(each, PAIR) or not is_prepared(each) for each in (train_dataset, *evaluated)):
            self.expands = self._choose_expansion()
        if self.expands:
            self._plans.clear()  # sequences then take more room
        for dataset in evaluated:
            if self._args.row_length is not None and self.can_plan(dataset):
                self.rows(dataset, self._args.eval_batch_size)

    def _choose_expansion(self) -> bool:
        """Choose whether packed rows attend in rows of whole sequences, and prepare the model for it.

        Raises:
            ExpansionImpossible: If the user insists and the model's attention is more than the kernels compute.
        """
        asked, longest = self._args.packed_attention, self.training_rows.longest
        is_long = self._runtime.has_attention_kernel and longest >= LONG_ROW
        if asked == "masks" or (asked == "auto" and not is_long):
            return False
        try:
            use_expanded_attention(self._model)
        except ExpansionImpossible as reason:
            if asked == "expanded":
                raise
            logger.warning(f"Rows of {longest} tokens attend through masks of their length squared. {reason}")
            return False
        return True

    def can_plan(self, dataset: Any) -> bool:
        """Return whether rows of ``dataset`` can be planned: of a stream if `max_length` bounds its pairs."""
        return isinstance(dataset, Dataset) or (dataset is not None and self._args.max_length is not None)

    def rows(self, dataset: Any, batch_size: int) -> RowPlan:
        """Return the rows of packed batches of ``dataset``, of all processes, planned once for each batch size.

        All streams have the same rows. They are planned from the first pairs of the first one, the training data's
        before others, and hold any pair of `max_length`; so a resumed run, and each process, plans the same ones.
        """
        chunk = shared_chunk(self._model)
        if self._fixed_rows is not None:
            return replace(self._fixed_rows, chunk=chunk)
        pairs = self._pairs_together(batch_size)
        key = getattr(dataset, "_fingerprint", "stream"), pairs
        if key not in self._plans:
            # kernels want lengths in large multiples
            multiple = 256 if self.expands and self._runtime.has_attention_kernel else 32
            is_training = dataset is self._train_dataset and batch_size == self._args.train_batch_size
            # in rows of whole sequences these share no room, and in chunks not all
            sizes_N = self._sizes_N if is_training and not self.expands and chunk == 1 else None
            if not isinstance(dataset, Dataset):
                sizes_N = self._sizes_of_stream(dataset, pairs, chunk)
            shards = self._args.mesh_shape.batch_shards
            self._plans[key] = plan_rows_of(
                dataset, self._hidden_size, pairs, shards, self._args, self.expands, multiple, sizes_N, chunk
            )
        return self._plans[key]

    def _sizes_of_stream(self, stream: Any, pairs: int, chunk: int) -> np.ndarray:
        """Return the sizes of a sample, many times, and of a batch of the longest pairs, which share no token."""
        self._streamed = self._streamed or length_stats_of_stream(stream)
        longest = 2 * round_up(self._args.max_length or 0, chunk)
        sizes_N = self._streamed.in_chunks(chunk).sizes_P if len(self._streamed) else np.array([longest])
        return np.append(np.resize(sizes_N, _BATCHES * pairs), [longest] * pairs)

    def _pairs_together(self, batch_size: int) -> int:
        """Return how many pairs are packed together: of planned rows, those of all processes on the mesh."""
        is_of_all = self._runtime.plans_shapes and self._args.shards_over_processes
        return batch_size * self._args.mesh_shape.batch_shards if is_of_all else batch_size

    @property
    def training_rows(self) -> RowPlan:
        return self.rows(self._train_dataset, self._args.train_batch_size)

    @property
    def _hidden_size(self) -> int:
        return self._model.config.get_text_config().hidden_size

    @property
    def crossover(self) -> float:
        """See `attention_crossover_length`."""
        return attention_crossover_length(self._hidden_size)

    def lengths(self, dataset: Any) -> tuple[int, ...] | None:
        """Return the row lengths of padded batches: a few that fit ``dataset``, or multiples of `pad_to_multiple_of`.

        None where rewards would change with them, and for a stream without `max_length`.
        """
        if self._keeps_lengths():
            return None
        is_known = isinstance(dataset, Dataset) and len(dataset) > 0
        longest = int(length_stats(dataset).lengths.longest_P.max()) if is_known else self._args.max_length
        if not longest:
            return None
        if multiple := self._args.pad_to_multiple_of:
            assert isinstance(multiple, int)  # the config has read its text forms
            return tuple(range(multiple, round_up(longest, multiple) + 1, multiple))
        return bucket_lengths(longest, self._args.max_shapes)
