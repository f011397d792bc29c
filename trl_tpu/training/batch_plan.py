"""Choose the layouts of a run's batches, and plan shapes for devices that compile once per shape.

A layout is a value. It makes its collator, knows its shapes and describes itself.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from ..compat.old_trl import RewardDataCollatorWithPadding
from ..config.reward_config import RewardConfig
from ..data.collate import BatchCollator, ComparisonRule, Part
from ..data.length_stats import is_prepared, kind_of_dataset, length_stats, length_stats_of_stream
from ..data.loader import sizes_by_prompt
from ..data.trl_dict import DataCollatorForPreference, DictCollator
from ..errors import UserError
from ..modeling.attention import tree_layout
from ..modeling.forward import PackingImpossible
from ..modeling.head_spec import keep_heads_in_float32, without_adapters
from ..modeling.layers import find_layers
from ..modeling.model_shape import outgrows_positions
from ..modeling.packability import make_packable, reads_padding, user_code_in
from ..modeling.recurrent_layers import shared_chunk
from ..modeling.static_shapes import ExpansionImpossible, use_expanded_attention, use_static_shapes
from ..packing.pack import TreeLayout, pack, pack_unpadded, pad
from ..packing.shapes import RowLengths, ShapePlan, ShapePlanner, attention_crossover_length, bucket_lengths, round_up
from ..parallel.shard import has_no_weights, of_first_process
from ..runtime import Runtime

logger = logging.getLogger(__name__)

# In shorter token rows, a mask per query and key costs less than moving the queries, keys and values of every layer.
LONG_ROW = 2048

# A stream's sample is repeated to this many batches. Only one batch of the longest possible rows is added, so shapes
# fit typical batches.
_STREAM_BATCHES = 4096

#: Collators of TRL and transformers. `BatchCollator` makes batches with the same token rows.
STANDARD_COLLATORS = (DataCollatorForPreference, RewardDataCollatorWithPadding, DataCollatorForTokenClassification)


# ---- layouts


@dataclass(frozen=True)
class Unpadded:
    """Each batch is packed into one token row without padding, or into token rows as long as its largest tree.

    Args:
        crossover: Length at which attention costs as much as everything else.
        trees: How the model reads the trees of a batch.

    Attributes:
        name: The kind of token rows, as recorded in checkpoints: "packed" or "padded".
        shapes: Number of batch shapes; None if shapes are not planned.
        accumulates: Whether some batches are split into several micro-batches.
    """

    crossover: float
    trees: TreeLayout
    name, shapes, accumulates = "packed", None, False

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        """Return the collator that makes process ``part``'s batches with comparisons by ``rule``."""
        pack_sequences = partial(pack_unpadded, attention_crossover_length=self.crossover, layout=self.trees)
        return BatchCollator(pack_sequences, pad_token_id, rule, part if part.count > 1 else None)

    def __str__(self) -> str:
        has_rows = self.trees.attention == "rows"
        rows = "token rows as long as its largest tree" if has_rows else "one token row without padding"
        return f"each packed into {rows}"


@dataclass(frozen=True)
class Planned:
    """Batches are packed into token rows of a few planned shapes. All processes have the same shapes.

    Args:
        plan: The token rows of all processes.
        expands: Whether attention is computed in rows of whole sequences.
    """

    plan: ShapePlan
    expands: bool
    name = "packed"

    @property
    def shapes(self) -> int:
        return len(self.plan.shapes)

    @property
    def accumulates(self) -> bool:
        return bool(self.plan.accumulate)

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        pack_sequences = partial(pack, plan=self.plan, expands=self.expands, part=(part.index, part.count))
        every = replace(part, rows=part.rows * part.count, shares_rows=True)
        return BatchCollator(pack_sequences, pad_token_id, rule, every)

    def __str__(self) -> str:
        attention = "in rows of whole sequences" if self.expands else "with masks"
        return f"packed into token rows of {self.plan}; attention is computed {attention}"


@dataclass(frozen=True)
class Padded:
    """Batches have one token row for each sequence.

    Args:
        reason: Why batches are not packed.
        lengths: Planned lengths; None pads to the longest sequence.
        is_static: Whether each batch has the same number of token rows, even if lengths are not planned.
        multiple: Lengths that are not planned are multiples of this.
    """

    reason: str
    lengths: tuple[int, ...] | None
    is_static: bool
    multiple: int
    name = "padded"
    accumulates = False

    @property
    def shapes(self) -> int | None:
        return None if self.lengths is None else len(self.lengths)

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        lengths = self.lengths or () if self.is_static else None
        pack_sequences = partial(pad, lengths=lengths, multiple=self.multiple)
        return BatchCollator(pack_sequences, pad_token_id, rule, part if self.is_static or part.count > 1 else None)

    def __str__(self) -> str:
        if self.lengths is None:
            return f"padded to their longest sequence ({self.reason})"
        count = len(self.lengths)
        listed = " or ".join(map(str, self.lengths)) if count <= 4 else f"one of {count} lengths in"
        return f"padded to {listed} tokens ({self.reason})"


@dataclass(frozen=True)
class TrlDict(Padded):
    """Batches are TRL's dict of padded rows, for user code that makes or reads them.

    Args:
        collate: TRL's or the user's collator.
        is_old: Whether ``collate`` reads the columns of TRL up to 0.23.
        padding_side: The side on which ``collate`` pads.
    """

    collate: Callable[[list[Any]], dict[str, Any]]
    is_old: bool
    padding_side: str

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        collate, own_part = self.collate, part if part.count > 1 else None
        if type(collate) is DataCollatorForPreference and rule.answers != 2:
            collate = replace(collate, answers=rule.answers)
        return DictCollator(collate, self.is_old, rule, pad_token_id, self.padding_side, self.lengths, own_part)


BatchLayout = Unpadded | Planned | Padded


# ---- the choice


def obstacle_to_packing(args: RewardConfig, model: PreTrainedModel, dataset: Any, is_planned: bool) -> str | None:
    """Return the first reason in the settings, the model's type and the training data not to pack batches, or None.

    User code is another reason, see `BatchPlan`, and so is a model that fails `make_packable`.

    Args:
        is_planned: Whether packed rows would have planned shapes.
    """
    is_recurrent, outgrows = shared_chunk(model) > 1, outgrows_positions(model, args.max_length)
    counts_input = args.include_num_input_tokens_seen != "no"
    is_unbounded = is_planned and not can_plan(dataset, args.max_length)
    obstacles = [
        (args.packing == "false", "packing is turned off"),
        (args.torch_compile and is_recurrent, "torch_compile would compile recurrent layers again for each batch"),
        (args.neftune_noise_alpha, "neftune_noise_alpha scales its noise by the length of token rows"),
        (outgrows, "long sequences change the positions of shorter ones in a batch (see max_length)"),
        (args.deepspeed_plugin, "DeepSpeed shards the model, and packed rows are not tested with that"),
        (counts_input, "include_num_input_tokens_seen counts padded rows (num_tokens in the logs does not)"),
        (is_unbounded, "train_dataset is a stream without max_length: its rows may exceed any planned token row"),
    ]
    return next((reason for holds, reason in obstacles if holds), None)


def can_plan(dataset: Any, max_length: int | None) -> bool:
    """Return whether shapes can be planned for ``dataset``. A stream needs ``max_length`` as a bound for its rows."""
    return isinstance(dataset, Dataset) or (dataset is not None and max_length is not None)


def plan_shapes_of(
    dataset: Any,
    hidden_size: int,
    batch_size: int,
    shards: int,
    args: RewardConfig,
    expands: bool = False,
    multiple: int = 32,
    sizes_N: np.ndarray | None = None,
    chunk: int = 1,
) -> ShapePlan:
    """Plan the shapes of packed batches of ``batch_size`` rows of ``dataset``.

    Args:
        dataset: A prepared dataset, or a stream with ``sizes_N``.
        hidden_size: Hidden size of the model.
        batch_size: Data rows per batch.
        shards: Number of devices that the token rows are sharded over.
        args: Settings of the run.
        expands: Whether attention reads rows of whole sequences. A prefix of all sequences then takes room in each.
        multiple: Lengths of token rows are multiples of this.
        sizes_N: Sizes of a stream's rows, or sizes from `sizes_by_prompt`. None computes each row's size.
        chunk: See `ShapePlan`.

    Raises:
        UserError: `row_length` is too short for a data row.
    """
    shared_prefix = length_stats(dataset).shared_prefix if isinstance(dataset, Dataset) and not expands else 0
    planner = ShapePlanner(
        length_stats(dataset).lengths.in_chunks(chunk).sizes_N if sizes_N is None else sizes_N,
        batch_size,
        shards,
        max_shapes=args.max_shapes,
        shared_prefix=shared_prefix // chunk * chunk,
        attention_crossover_length=attention_crossover_length(hidden_size),
        multiple=max(multiple, chunk),
        row_length=args.row_length,
    )
    return replace(planner.plan(), chunk=chunk)


class BatchPlan:
    """Chooses the layout of each dataset's batches: packed, unless there is an obstacle.

    Args:
        args: Settings of the run.
        model: The model with its final attention implementation. It is changed to read packed rows.
        tokenizer: The model's tokenizer.
        train_dataset: The training data, raw or prepared. `prepare` gets the prepared data later.
        runtime: The devices' runtime.
        data_collator: A user-defined collator; None for the default.
        old_columns: Whether the data has the columns of TRL's old API.
        reads_padded_rows: Returns the name of a user-defined method that reads batches and so expects TRL's padded
            rows; None without such a method.
        fixed_shapes: Shapes for every packed batch. None chooses shapes that fit the data.

    Attributes:
        padding_reason: The obstacle to packing; None if batches are packed.

    Raises:
        UserError: packing=True is set, but packing is impossible.
    """

    padding_reason: str | None = None
    _expands = False  # whether planned rows attend in expanded rows
    _sizes_N: np.ndarray | None = None  # sizes of the training rows with `group_by_prompt`
    _streamed: RowLengths | None = None  # lengths of the first rows of the first stream

    def __init__(
        self,
        args: RewardConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Any,
        runtime: Runtime,
        *,
        data_collator: Any = None,
        old_columns: bool = False,
        reads_padded_rows: Callable[[], str | None] = lambda: None,
        fixed_shapes: ShapePlan | None = None,
    ) -> None:
        self._args, self._tokenizer, self._runtime = args, tokenizer, runtime
        self._train_dataset, self._collator = train_dataset, data_collator
        self._old_columns, self._reads_padded_rows, self._fixed_shapes = old_columns, reads_padded_rows, fixed_shapes
        self._is_planned = runtime.plans_shapes or fixed_shapes is not None
        self._plans: dict[tuple[str, int], ShapePlan] = {}
        self._reads_padding: dict[str, bool] = {}  # by the description of user code in the model
        self._pad_for_reason(obstacle_to_packing(args, model, train_dataset, self._is_planned) or self._user_code())
        self.use_model(model)

    def use_model(self, model: PreTrainedModel) -> None:
        """Prepare the first model, or a new model of `model_init`, for the device and for this plan's batches.

        Raises:
            UserError: packing=True, but the model cannot read packed rows; or scan_layers=True, but its layers cannot
                run as a loop.
        """
        keep_heads_in_float32(model)
        if self._runtime.plans_shapes:
            use_static_shapes(model)
        self._whole_model, self._model = model, without_adapters(model)
        if self._args.scan_layers:
            find_layers(self._model)  # raises before any data is read
        if self.padding_reason is None:
            reason = of_first_process(self._obstacle_in_model, model, self._args.shards_over_processes)
            if reason is None and has_no_weights(model):
                reason = self._obstacle_in_model()  # without a trial
            self._pad_for_reason(reason)
        if self._expands and self.padding_reason is None:
            use_expanded_attention(self._model)
        if self._runtime.plans_shapes and self.padding_reason is not None:
            self._keeps_lengths()  # while the model is on the host: the trial forward then compiles nothing

    def _obstacle_in_model(self) -> str | None:
        try:
            pad_token_id, device = self._tokenizer.pad_token_id, self._args.device
            make_packable(self._whole_model, pad_token_id, not self._is_planned, device, self._dtype)
        except PackingImpossible as reason:
            return str(reason)
        return None

    def prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Plan shapes for prepared datasets, choose their attention, and check that all rows fit into `row_length`.

        Raises:
            UserError: `row_length` is too short for a row of the training or evaluation data (checked here, not hours
                into a run); the model does not allow the chosen `packed_attention`; or `group_by_prompt` is set for a
                stream.
        """
        args, self._train_dataset = self._args, train_dataset
        if args.group_by_prompt:
            self._sizes_N = sizes_by_prompt(train_dataset, self._rows_together(args.train_batch_size))
        if not self._runtime.plans_shapes or self.padding_reason is not None:
            return
        evaluated = [*eval_dataset.values()] if isinstance(eval_dataset, Mapping) else [eval_dataset]
        # expanded rows hold pairs only
        if all(kind_of_dataset(data).are_pairs for data in (train_dataset, *evaluated)):
            self._choose_expansion()
        for dataset in evaluated:
            if args.row_length is not None and can_plan(dataset, args.max_length):
                self.shapes_of(dataset, args.eval_batch_size)

    def _choose_expansion(self) -> None:
        """Choose whether packed rows attend in rows of whole sequences, and prepare the model for it.

        Raises:
            ExpansionImpossible: packed_attention='expanded', but the kernels cannot compute the model's attention.
        """
        asked, shapes = self._args.packed_attention, self.shapes_of(self._train_dataset, self._args.train_batch_size)
        is_long = self._runtime.has_attention_kernel and shapes.longest >= LONG_ROW
        if asked == "expanded" or (asked == "auto" and is_long):
            with contextlib.suppress(ExpansionImpossible) if asked == "auto" else contextlib.nullcontext():
                use_expanded_attention(self._model)
                self._expands = True
                self._plans.clear()  # plan again: whole sequences take more room

    def _user_code(self) -> str | None:
        """Return a description of user code that makes or reads batches and so needs TRL's dict, or None."""
        if self._collator is not None and type(self._collator) not in STANDARD_COLLATORS:
            return "a custom data collator makes the batches"
        method, args = self._reads_padded_rows(), self._args
        if method is None:
            return None
        if method.endswith("_dataloader") and args.train_batch_size > args.per_device_train_batch_size:
            return f"{method} is overridden; a batch of its loader is the batch of all devices of the mesh"
        return f"{method} is overridden, and such code expects padded rows"

    def _pad_for_reason(self, obstacle: str | None) -> None:
        """Pad batches from now on if there is an obstacle to packing.

        Raises:
            UserError: packing=True is set.
        """
        if obstacle is None:
            return
        if self._args.packing == "true":
            raise UserError(f"packing=True is impossible: {obstacle}. Set packing='auto', or remove the obstacle.")
        if self._args.packing == "auto":
            logger.warning(f"Batches are padded, not packed: {obstacle}.")
        self.padding_reason = obstacle

    # ---- layouts and collators

    @property
    def layout(self) -> BatchLayout:
        """The layout of training batches."""
        return self.layout_of(self._train_dataset, self._args.train_batch_size)

    def layout_of(self, dataset: Any, batch_size: int) -> BatchLayout:
        """Return the layout of batches of ``dataset`` with ``batch_size`` data rows per process."""
        args, is_static = self._args, self._runtime.plans_shapes
        if self.padding_reason is None and not self._is_planned:
            trees = tree_layout(self._model, args.device, self._dtype, compiles=args.torch_compile)
            return Unpadded(attention_crossover_length(self._hidden_size), trees)
        if self.padding_reason is None and can_plan(dataset, args.max_length):
            return Planned(self.shapes_of(dataset, batch_size), self._expands)
        reason = self.padding_reason or "a stream without max_length"
        has_own_format = self._collator is None or isinstance(self._collator, STANDARD_COLLATORS)
        lengths = self._lengths(dataset) if is_static and has_own_format else None
        if self._user_code() is None:
            return Padded(reason, lengths, is_static, self._multiple or 1)
        collate = self._collator or self.default_collator()
        are_old = self._old_columns or isinstance(collate, RewardDataCollatorWithPadding)
        return TrlDict(reason, lengths, is_static, self._multiple or 1, collate, are_old, self.padding_side)

    def collator(self, dataset: Any, batch_size: int, user_collator: Any) -> Callable[..., Any]:
        """Return the collator of ``dataset``.

        Batches are padded from now on if user code has replaced a part of the model or the collator since packing was
        chosen. If processes share one sharded model, the collator gets the data rows of all processes and makes this
        process's part. With planned shapes, the parts of all processes have the same shape.

        Args:
            dataset: Prepared data; a stream's rows may have additional columns.
            batch_size: P, data rows per process.
            user_collator: The trainer's collator. It makes TRL's dict.

        Raises:
            UserError: packing=True is set, but packing is impossible.
        """
        self._collator = user_collator
        if self.padding_reason is None:
            self._pad_for_reason(self._user_code() or user_code_in(self._whole_model))
        args, part = self._args, Part(batch_size, *self._runtime.batch_part)
        answers = length_stats(dataset).answers if is_prepared(dataset) else 2  # streams hold pairs only
        rule = ComparisonRule.of(args, kind_of_dataset(dataset), answers)
        return self.layout_of(dataset, batch_size).collator(self._tokenizer.pad_token_id, rule, part)

    def default_collator(self) -> Callable[[list[Any]], dict[str, Any]]:
        """Return TRL's collator for the data, for code that makes its own batches."""
        if self._old_columns:
            return RewardDataCollatorWithPadding(self._tokenizer, pad_to_multiple_of=self._multiple)
        if kind_of_dataset(self._train_dataset).is_one_sequence:
            return DataCollatorForTokenClassification(self._tokenizer, pad_to_multiple_of=self._multiple)
        return DataCollatorForPreference(self._tokenizer.pad_token_id, self._multiple)

    @property
    def padding_side(self) -> str:
        """The padding side. TRL's current collator ignores the tokenizer and pads on the right."""
        return self._tokenizer.padding_side if self._old_columns else "right"

    # ---- planned shapes

    def shapes_of(self, dataset: Any, batch_size: int) -> ShapePlan:
        """Return the shapes of packed batches of ``dataset``, over all processes. Plan them once per batch size.

        All streams have the same shapes. They are planned from the first rows of the first stream (the training data,
        if it is a stream), and from `max_length`, so every process and every resumed run plans the same shapes.
        """
        chunk = shared_chunk(self._model)
        if self._fixed_shapes is not None:
            return replace(self._fixed_shapes, chunk=chunk)
        rows = self._rows_together(batch_size)
        key = getattr(dataset, "_fingerprint", "stream"), rows
        if key not in self._plans:
            # attention kernels need lengths in large multiples
            multiple = 256 if self._expands and self._runtime.has_attention_kernel else 32
            is_training = dataset is self._train_dataset and batch_size == self._args.train_batch_size
            # `sizes_by_prompt` assumes that rows of one prompt share all its tokens: not in expanded rows or chunks
            sizes_N = self._sizes_N if is_training and not self._expands and chunk == 1 else None
            if not isinstance(dataset, Dataset):
                sizes_N = self._sizes_of_stream(dataset, rows, chunk)
            shards = self._args.mesh_shape.batch_shards
            self._plans[key] = plan_shapes_of(
                dataset, self._hidden_size, rows, shards, self._args, self._expands, multiple, sizes_N, chunk
            )
        return self._plans[key]

    def _sizes_of_stream(self, stream: Any, rows: int, chunk: int) -> np.ndarray:
        """Return the sizes of a sample, repeated, and of one batch of the longest rows without shared tokens."""
        self._streamed = self._streamed or length_stats_of_stream(stream)
        longest = 2 * round_up(self._args.max_length or 0, chunk)
        sizes_N = self._streamed.in_chunks(chunk).sizes_N if len(self._streamed) else np.array([longest])
        return np.append(np.resize(sizes_N, _STREAM_BATCHES * rows), [longest] * rows)

    def _rows_together(self, batch_size: int) -> int:
        """Return the number of data rows that are packed together: with planned rows, those of the whole mesh."""
        covers_mesh = self._runtime.plans_shapes and self._args.shards_over_processes
        return batch_size * self._args.mesh_shape.batch_shards if covers_mesh else batch_size

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return torch.bfloat16 if self._args.bf16 else torch.float16 if self._args.fp16 else self._model.dtype

    @property
    def _hidden_size(self) -> int:  # read for packed and planned rows only: a custom config may lack it
        return self._model.config.get_text_config().hidden_size

    @property
    def _multiple(self) -> Any:
        return self._args.pad_to_multiple_of  # an int or None: the config has parsed text

    def _lengths(self, dataset: Any) -> tuple[int, ...] | None:
        """Return the lengths of padded batches: a few that fit ``dataset``, or multiples of `pad_to_multiple_of`.

        None if rewards depend on padding, or for a stream without `max_length`.
        """
        if self._keeps_lengths():
            return None
        is_known = isinstance(dataset, Dataset) and len(dataset) > 0
        longest = int(length_stats(dataset).lengths.longest_N.max()) if is_known else self._args.max_length
        if not longest:
            return None
        if multiple := self._multiple:
            return tuple(range(multiple, round_up(longest, multiple) + 1, multiple))
        return bucket_lengths(longest, self._args.max_shapes)

    def _keeps_lengths(self) -> bool:
        """Return whether batches keep TRL's lengths, because rewards depend on the amount of padding.

        Rewards can depend on padding with user-defined forwards, with prompt tuning, and with positions that depend on
        the longest sequence.
        """
        own_code = user_code_in(self._whole_model)
        if own_code is not None and own_code not in self._reads_padding and not self._multiple:
            reads = partial(reads_padding, self._whole_model, self._tokenizer.pad_token_id)
            found = of_first_process(reads, self._whole_model, self._args.shards_over_processes)
            self._reads_padding[own_code] = found is not False  # None: the step is planned without weights
        depends_on_padding = self._reads_padding.get(own_code or "", False)
        return depends_on_padding or outgrows_positions(self._model, self._args.max_length)
