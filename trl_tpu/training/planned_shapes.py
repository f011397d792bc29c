"""Shapes of batches on devices that compile once per shape: rows of packed batches, lengths of padded batches."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from ..config.reward_config import RewardConfig
from ..data.length_stats import kind_of_dataset, length_stats, length_stats_of_stream
from ..data.loader import sizes_by_prompt
from ..modeling.adapters import without_adapters
from ..modeling.model_shape import outgrows_positions
from ..modeling.packability import reads_padding, user_code_in
from ..modeling.recurrent_layers import shared_chunk
from ..modeling.static_shapes import ExpansionImpossible, use_expanded_attention
from ..packing.shapes import PairLengths, RowPlan, attention_crossover_length, bucket_lengths, plan_rows, round_up
from ..runtime import Runtime

logger = logging.getLogger(__name__)

# In shorter rows, a mask per query and key costs less than moving the queries, keys and values of every layer.
LONG_ROW = 2048

# A stream's sample is repeated to this many batches. Only one batch of the longest possible pairs is added, so shapes
# fit typical batches.
_STREAM_BATCHES = 4096


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
    """Plan the rows of packed batches of ``pairs`` pairs of ``dataset``.

    Args:
        dataset: A prepared dataset, or a stream with ``sizes_N``.
        hidden_size: Hidden size of the model.
        pairs: Pairs per batch.
        shards: Number of devices that the rows are sharded over.
        args: Settings of the run.
        expands: Whether attention reads rows of whole sequences. A prefix of all sequences then takes room in each.
        multiple: Row lengths are multiples of this.
        sizes_N: Sizes of a stream's pairs, or sizes from `sizes_by_prompt`. None computes each pair's size.
        chunk: See `RowPlan`.

    Raises:
        UserError: `row_length` is too short for a pair.
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
    """The shapes of a run's batches, planned from the lengths of the data.

    Args:
        args: Settings of the run.
        runtime: The devices' runtime.
        fixed_rows: Rows for every packed batch. None plans rows that fit the data.
    """

    expands = False
    """Whether attention over packed rows is computed in rows of whole sequences."""

    def __init__(self, args: RewardConfig, runtime: Runtime, fixed_rows: RowPlan | None) -> None:
        self._args, self._runtime, self._fixed_rows = args, runtime, fixed_rows
        self._plans: dict[tuple[str, int], RowPlan] = {}
        self._sizes_N: np.ndarray | None = None  # sizes of the training pairs with `group_by_prompt`
        self._streamed: PairLengths | None = None  # lengths of the first pairs of the first stream
        self._train_dataset: Any = None
        self._reads_padding: dict[str, bool] = {}  # by the description of user code in the model

    def use_model(self, model: PreTrainedModel, pad_token_id: int, is_packed: bool) -> None:
        """Plan for ``model``: the run's first model, or a new model of `model_init`."""
        self._whole_model, self._model, self._pad_token_id = model, without_adapters(model), pad_token_id
        if is_packed and self.expands:
            use_expanded_attention(self._model)
        if not is_packed and self._runtime.plans_shapes:
            self._keeps_lengths()  # while the model is on the host: the trial forward then compiles nothing

    def _keeps_lengths(self) -> bool:
        """Return whether batches keep TRL's lengths, because rewards depend on the amount of padding.

        Rewards can depend on padding with user-defined forwards, with prompt tuning, and with positions that depend on
        the longest sequence.
        """
        own_code = user_code_in(self._whole_model)
        if own_code is not None and own_code not in self._reads_padding and not self._args.pad_to_multiple_of:
            self._reads_padding[own_code] = reads_padding(self._whole_model, self._pad_token_id)
            if self._reads_padding[own_code]:
                logger.warning(
                    f"Rewards depend on padding, so batches are padded to their longest sequence, and every new "
                    f"length triggers a compilation: {own_code}. `pad_to_multiple_of` reduces the number of lengths; "
                    "as in TRL, it changes rewards too."
                )
        depends_on_padding = self._reads_padding.get(own_code or "", False)
        return depends_on_padding or outgrows_positions(self._model, self._args.max_length)

    def prepare(self, train_dataset: Any, evaluated: Sequence[Any], is_packed: bool) -> None:
        """Plan the rows of prepared datasets; see `BatchPlan.prepare`."""
        self._train_dataset = train_dataset
        if self._args.group_by_prompt:
            self._sizes_N = sizes_by_prompt(train_dataset, self._pairs_together(self._args.train_batch_size))
        if not is_packed:
            return
        # expanded rows hold pairs only
        if all(kind_of_dataset(data).sequences == 2 for data in (train_dataset, *evaluated)):
            self.expands = self._choose_expansion()
        if self.expands:
            self._plans.clear()  # plan again: whole sequences take more room
        for dataset in evaluated:
            if self._args.row_length is not None and self.can_plan(dataset):
                self.rows(dataset, self._args.eval_batch_size)

    def _choose_expansion(self) -> bool:
        """Choose whether packed rows attend in rows of whole sequences, and prepare the model for it.

        Raises:
            ExpansionImpossible: packed_attention='expanded', but the kernels cannot compute the model's attention.
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
            logger.warning(f"Rows of {longest} tokens use attention masks of {longest} x {longest} entries. {reason}")
            return False
        return True

    def can_plan(self, dataset: Any) -> bool:
        """Return whether rows of ``dataset`` can be planned. A stream needs `max_length` as a bound for its pairs."""
        return isinstance(dataset, Dataset) or (dataset is not None and self._args.max_length is not None)

    def rows(self, dataset: Any, batch_size: int) -> RowPlan:
        """Return the rows of packed batches of ``dataset``, over all processes. Plan them once per batch size.

        All streams have the same rows. They are planned from the first pairs of the first stream (the training data,
        if it is a stream), and from `max_length`, so every process and every resumed run plans the same rows.
        """
        chunk = shared_chunk(self._model)
        if self._fixed_rows is not None:
            return replace(self._fixed_rows, chunk=chunk)
        pairs = self._pairs_together(batch_size)
        key = getattr(dataset, "_fingerprint", "stream"), pairs
        if key not in self._plans:
            # attention kernels need lengths in large multiples
            multiple = 256 if self.expands and self._runtime.has_attention_kernel else 32
            is_training = dataset is self._train_dataset and batch_size == self._args.train_batch_size
            # `sizes_by_prompt` assumes that pairs of one prompt share all its tokens: not in expanded rows or chunks
            sizes_N = self._sizes_N if is_training and not self.expands and chunk == 1 else None
            if not isinstance(dataset, Dataset):
                sizes_N = self._sizes_of_stream(dataset, pairs, chunk)
            shards = self._args.mesh_shape.batch_shards
            self._plans[key] = plan_rows_of(
                dataset, self._hidden_size, pairs, shards, self._args, self.expands, multiple, sizes_N, chunk
            )
        return self._plans[key]

    def _sizes_of_stream(self, stream: Any, pairs: int, chunk: int) -> np.ndarray:
        """Return the sizes of a sample, repeated, and of one batch of the longest pairs without shared tokens."""
        self._streamed = self._streamed or length_stats_of_stream(stream)
        longest = 2 * round_up(self._args.max_length or 0, chunk)
        sizes_N = self._streamed.in_chunks(chunk).sizes_P if len(self._streamed) else np.array([longest])
        return np.append(np.resize(sizes_N, _STREAM_BATCHES * pairs), [longest] * pairs)

    def _pairs_together(self, batch_size: int) -> int:
        """Return the number of pairs that are packed together: with planned rows, the pairs of the whole mesh."""
        covers_mesh = self._runtime.plans_shapes and self._args.shards_over_processes
        return batch_size * self._args.mesh_shape.batch_shards if covers_mesh else batch_size

    @property
    def training_rows(self) -> RowPlan:
        return self.rows(self._train_dataset, self._args.train_batch_size)

    @property
    def _hidden_size(self) -> int:
        return self._model.config.get_text_config().hidden_size

    @property
    def crossover(self) -> float:
        """The row length at which attention costs as much as everything else."""
        return attention_crossover_length(self._hidden_size)

    def lengths(self, dataset: Any) -> tuple[int, ...] | None:
        """Return the row lengths of padded batches: a few that fit ``dataset``, or multiples of `pad_to_multiple_of`.

        None if rewards depend on padding, or for a stream without `max_length`.
        """
        if self._keeps_lengths():
            return None
        is_known = isinstance(dataset, Dataset) and len(dataset) > 0
        longest = int(length_stats(dataset).lengths.longest_P.max()) if is_known else self._args.max_length
        if not longest:
            return None
        if multiple := self._args.pad_to_multiple_of:
            assert isinstance(multiple, int)  # the config has parsed text
            return tuple(range(multiple, round_up(longest, multiple) + 1, multiple))
        return bucket_lengths(longest, self._args.max_shapes)
