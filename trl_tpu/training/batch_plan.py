"""Decide whether a run's batches are packed, plan their shapes, and make their collators."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.utils import parse_flag_from_env
from transformers import DataCollatorForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from ..config.reward_config import RewardConfig
from ..data.collate import BatchCollator, ComparisonRule, Part
from ..data.collators import DataCollatorForPreference, DictCollator, RewardDataCollatorWithPadding
from ..data.length_stats import is_prepared, kind_of_dataset, length_stats
from ..errors import UserError
from ..modeling.adapters import without_adapters
from ..modeling.forward import PackingImpossible
from ..modeling.layers import find_layers
from ..modeling.model_shape import outgrows_positions
from ..modeling.packability import make_packable, user_code_in
from ..modeling.recurrent_layers import shared_chunk
from ..modeling.static_shapes import fit_to_device
from ..packing.pack import pack_unpadded, pad
from ..packing.planned import pack
from ..packing.shapes import RowPlan
from ..runtime import Runtime
from .planned_shapes import PlannedShapes

logger = logging.getLogger(__name__)

# collators of TRL and transformers; `BatchCollator` makes batches with the same rows
_COLLATORS = (DataCollatorForPreference, RewardDataCollatorWithPadding, DataCollatorForTokenClassification)


class BatchPlan:
    """Decides once per run whether batches are packed, and makes the collators for its datasets.

    On plain torch, a packed batch is one row without padding. On devices that compile once per shape, and with
    ``fixed_rows``, packed batches have rows of a few planned shapes. On these devices, padded batches have a few
    planned lengths, unless rewards depend on padding.

    Args:
        args: Settings of the run.
        model: The model with its final attention implementation. It is changed to read packed rows.
        tokenizer: The model's tokenizer.
        train_dataset: The training data, raw or prepared. `prepare` gets the prepared data later.
        runtime: The devices' runtime.
        data_collator: A user-defined collator; None for the default.
        old_columns: Whether the data has the columns of TRL's old API.
        reads_padded_rows: Returns the name of a user-defined method that reads batches and so expects TRL's padded
            layout; None without such a method.
        fixed_rows: Rows for every packed batch. None chooses rows that fit the data.

    Raises:
        UserError: packing=True is set, but packing is impossible.
    """

    padding_reason: str | None = None
    """The obstacle to packing; None if batches are packed."""

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
        fixed_rows: RowPlan | None = None,
    ) -> None:
        self._args, self._tokenizer, self._runtime = args, tokenizer, runtime
        self._train_dataset, self._collator = train_dataset, data_collator
        self._old_columns, self._reads_padded_rows = old_columns, reads_padded_rows
        self.planned = PlannedShapes(args, runtime, fixed_rows)
        self.plans_shapes = runtime.plans_shapes
        self._is_unpadded = not self.plans_shapes and fixed_rows is None  # applies to packed batches only
        self._pad_for_reason(self._obstacle_in_settings(model) or self._obstacle_in_code())
        self.use_model(model)

    # ---- the decision

    @property
    def packed(self) -> bool:
        return self.padding_reason is None

    @property
    def layout(self) -> str:
        """The layout of batches, as recorded in checkpoints: "packed" or "padded"."""
        return "packed" if self.packed else "padded"

    def use_model(self, model: PreTrainedModel) -> None:
        """Prepare the first model, or a new model of `model_init`, for the device and for this plan's batches.

        Raises:
            UserError: packing=True, but the model cannot read packed rows; or scan_layers=True, but its layers cannot
                run as a loop.
        """
        fit_to_device(model, is_static=self.plans_shapes)
        self._whole_model, self._model = model, without_adapters(model)
        if self._args.scan_layers:
            find_layers(self._model)  # raises before any data is read
        if self.packed:
            try:
                make_packable(model, self._pad_token_id, is_unpadded=self._is_unpadded)
            except PackingImpossible as reason:
                self._pad_for_reason(str(reason))
        if self.packed and not self._packs(self._train_dataset):
            self._pad_for_reason(
                "train_dataset is a stream without max_length, so its pairs may be longer than any row"
            )
        self.planned.use_model(model, self._pad_token_id, self.packed)

    def prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Plan the rows of prepared datasets, choose their attention, and check that all pairs fit into `row_length`.

        Raises:
            UserError: `row_length` is too short for a pair of the training or evaluation data (checked here, not hours
                into a run); the model does not allow the chosen `packed_attention`; or `group_by_prompt` is set for a
                stream.
        """
        self._train_dataset = train_dataset
        evaluated = [*eval_dataset.values()] if isinstance(eval_dataset, Mapping) else [eval_dataset]
        self.planned.prepare(train_dataset, evaluated, self.plans_shapes and self._packs(train_dataset))

    def _packs(self, dataset: Any) -> bool:
        """Return whether batches of ``dataset`` are packed. They are padded if no shapes can be planned."""
        return self.packed and (self._is_unpadded or self.planned.can_plan(dataset))

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

    def _obstacle_in_settings(self, model: PreTrainedModel) -> str | None:
        args, counted = self._args, self._args.include_num_input_tokens_seen
        changes_positions = outgrows_positions(model, args.max_length)
        recompiles = args.torch_compile and self._is_unpadded
        is_gpu = self._runtime.device.type == "cuda" and not args.use_cpu
        prefers_padding = args.packing == "auto" and is_gpu and shared_chunk(model) > 1
        shards = args.fsdp or args.deepspeed_plugin or args.parallelism_config
        obstacles = {
            "packing is turned off": args.packing == "false",
            "torch_compile would compile the model again for each new shape of a row": recompiles,
            "neftune_noise_alpha scales its noise by the length of rows": args.neftune_noise_alpha,
            "long sequences change the positions of shorter ones in a batch (see max_length)": changes_positions,
            "accelerate shards the model, and packed rows are not tested with that": (
                shards or parse_flag_from_env("ACCELERATE_USE_FSDP")
            ),
            "include_num_input_tokens_seen counts padded rows (num_tokens in the logs does not)": (
                getattr(counted, "value", counted) not in (False, "no")
            ),
            "on a GPU, recurrent layers are faster in padded rows: packed rows take many small steps": prefers_padding,
        }
        return next((obstacle for obstacle, is_present in obstacles.items() if is_present), None)

    def _obstacle_in_code(self) -> str | None:
        """Return a description of user code that expects padded rows; None if there is none."""
        if self._collator is not None and type(self._collator) not in _COLLATORS:
            return "a custom data collator makes the batches"
        method = self._reads_padded_rows()
        if method is None:
            return None
        if method.endswith("_dataloader") and self._args.train_batch_size > self._args.per_device_train_batch_size:
            return f"{method} is overridden; a batch of its loader is the batch of all devices of the mesh"
        return f"{method} is overridden, and such code expects padded rows"

    # ---- collators

    @property
    def padding_side(self) -> str:
        """The padding side. TRL's current collator ignores the tokenizer and pads on the right."""
        return self._tokenizer.padding_side if self._old_columns else "right"

    @property
    def _pad_token_id(self) -> int:
        return self._tokenizer.pad_token_id

    def default_collator(self) -> Callable[[list[Any]], dict[str, Any]]:
        """Return TRL's collator for the data, for code that makes its own batches."""
        multiple: Any = self._args.pad_to_multiple_of  # an int or None: the config has parsed text
        if self._old_columns:
            return RewardDataCollatorWithPadding(self._tokenizer, pad_to_multiple_of=multiple)
        if kind_of_dataset(self._train_dataset).is_one_sequence:
            return DataCollatorForTokenClassification(self._tokenizer, pad_to_multiple_of=multiple)
        return DataCollatorForPreference(self._pad_token_id, multiple)

    def collator(self, dataset: Any, batch_size: int, user_collator: Any) -> Callable[..., Any]:
        """Return the collator of ``dataset``: for packed batches, padded batches, or TRL's dict with user code.

        Batches are padded from now on if user code has replaced a part of the model or the collator since packing was
        chosen. If processes share one sharded model, the collator gets the data rows of all processes and makes this
        process's part. With planned shapes, the parts of all processes have the same shape.

        Args:
            dataset: Prepared data; a stream's examples may have additional columns.
            batch_size: P, data rows per process.
            user_collator: The trainer's collator. It makes TRL's dict.

        Raises:
            UserError: packing=True is set, but packing is impossible.
        """
        self._collator = user_collator
        if self.packed:
            self._pad_for_reason(self._obstacle_in_code() or user_code_in(self._whole_model))
        args, (index, count) = self._args, self._runtime.batch_part
        answers = length_stats(dataset).answers if is_prepared(dataset) else 2  # streams hold pairs only
        rule = ComparisonRule.of(args, kind_of_dataset(dataset), answers)
        part = Part(batch_size, index, count) if count > 1 else None
        if self._packs(dataset) and self._is_unpadded:
            pack_rows = partial(pack_unpadded, attention_crossover_length=self.planned.crossover)
        elif self._packs(dataset):
            rows = self.planned.rows(dataset, batch_size)
            pack_rows = partial(pack, plan=rows, expands=self.planned.expands, part=(index, count))
            part = Part(batch_size * count, index, count, shares_pairs=True)
        elif self._obstacle_in_code() is not None:
            are_old = self._old_columns or isinstance(user_collator, RewardDataCollatorWithPadding)
            collate = user_collator
            if type(collate) is DataCollatorForPreference and answers != 2:
                collate = replace(collate, answers=answers)
            lengths = self._lengths_of(dataset)
            return DictCollator(collate, are_old, rule, self._pad_token_id, self.padding_side, lengths, part)
        else:
            lengths = self._lengths_of(dataset)
            if self.plans_shapes:  # a fixed number of rows, even if the length is not planned
                lengths, part = lengths or (), Part(batch_size, index, count)
            multiple: Any = args.pad_to_multiple_of or 1
            pack_rows = partial(pad, lengths=lengths, multiple=multiple)
        return BatchCollator(pack_rows, self._pad_token_id, rule, part)

    # ---- shapes

    def _lengths_of(self, dataset: Any) -> tuple[int, ...] | None:
        """Choose the row lengths of padded batches of ``dataset`` on a device that compiles once per length.

        None if lengths are not planned: on other devices, for user-defined collators, and if `PlannedShapes.lengths`
        returns None.
        """
        has_own_format = self._collator is None or isinstance(self._collator, _COLLATORS)
        return self.planned.lengths(dataset) if self.plans_shapes and has_own_format else None

    @property
    def shapes(self) -> int | None:
        """The number of batch shapes in training; None if shapes are not planned."""
        if self.packed:
            return None if self._is_unpadded else len(self.planned.training_rows.shapes)
        lengths = self._lengths_of(self._train_dataset)
        return None if lengths is None else len(lengths)

    @property
    def accumulates(self) -> bool:
        """True if some batches are split into several micro-batches."""
        return self.packed and not self._is_unpadded and bool(self.planned.training_rows.accumulate)

    def describe(self) -> str:
        """Describe training batches for the log: packed or padded, their shapes, and why they are not packed."""
        if self.packed and self._is_unpadded:
            return "each packed into one row without padding"
        if self.packed:
            attention = "in rows of whole sequences" if self.planned.expands else "with masks"
            return f"packed into rows of {self.planned.training_rows}; attention is computed {attention}"
        lengths = self._lengths_of(self._train_dataset)
        if lengths is None:
            return f"padded to their longest sequence ({self.padding_reason})"
        listed = " or ".join(map(str, lengths)) if len(lengths) <= 4 else f"one of {len(lengths)} lengths in"
        return f"padded to {listed} tokens ({self.padding_reason})"
