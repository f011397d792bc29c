"""Decides once whether a run's batches are packed, plans their shapes, and makes their collators."""

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
from ..data.length_stats import SOLUTION, has_row_format, is_prepared, length_stats
from ..errors import UserError
from ..modeling.adapters import without_adapters
from ..modeling.forward import PackingImpossible
from ..modeling.layers import find_layers
from ..modeling.losses import TIES
from ..modeling.model_shape import outgrows_positions
from ..modeling.packability import make_packable, own_code_of
from ..modeling.static_shapes import fit_to_device
from ..packing.pack import pack_unpadded, pad
from ..packing.planned import pack
from ..packing.shapes import RowPlan
from ..runtime import Runtime
from .planned_shapes import PlannedShapes

logger = logging.getLogger(__name__)

# of TRL and transformers: the batches that we make in their place have the same rows
_COLLATORS = (DataCollatorForPreference, RewardDataCollatorWithPadding, DataCollatorForTokenClassification)


class BatchPlan:
    """Decides once whether a run's batches are packed, and makes the collators for its datasets.

    Packed batches are one row without padding on plain torch; on XLA, and where a model's own attention wants one
    mask, they are rows of a few planned shapes. Padded batches have a few planned lengths on XLA, unless rewards would
    change with them.

    Args:
        args: The run's settings.
        model: Its model, with the attention it trains with; it is made to read packed rows.
        tokenizer: The model's.
        train_dataset: Pairs, as raw or as prepared as they are. `prepare` gets them when they are token ids.
        runtime: The devices' runtime.
        data_collator: The user's own, if any.
        old_columns: Whether the data has the columns of TRL's old API.
        reads_padded_rows: Names a method of the user's that reads batches, and so expects TRL's padded layout; None
            where there is none.
        fixed_rows: Rows for every batch, instead of rows that fit the data.

    Raises:
        UserError: If the user insists on packing and something is in its way.
    """

    padded_because: str | None = None
    """The obstacle to packing; None where batches are packed."""

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
        self._is_unpadded = not self.plans_shapes and fixed_rows is None  # where batches are packed
        self._pad_because(self._obstacle_in_settings(model) or self._obstacle_in_code())
        self.use_model(model)

    # ---- the decision

    @property
    def packed(self) -> bool:
        return self.padded_because is None

    @property
    def layout(self) -> str:
        """The layout of batches that a checkpoint was trained on: "packed" or "padded"."""
        return "packed" if self.packed else "padded"

    def use_model(self, model: PreTrainedModel) -> None:
        """Make ``model``, the first or one that `model_init` made anew, compute on the device and read these batches.

        Raises:
            UserError: If the user insists on packing and the model cannot, or on `scan_layers` and its layers cannot
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
                self._pad_because(str(reason))
        if self.packed and not self._packs(self._train_dataset):
            self._pad_because("train_dataset is a stream without max_length, so no row is sure to hold its pairs")
        self.planned.use_model(model, self._pad_token_id, self.packed)

    def prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Plan the rows of prepared datasets, choose how they attend, and check that a `row_length` holds every pair.

        Raises:
            UserError: If it is too short for a pair of the training or evaluation data, and not hours into a run; if
                the user insists on attention that the model does not allow; or on `group_by_prompt` of a stream.
        """
        self._train_dataset = train_dataset
        evaluated = [*eval_dataset.values()] if isinstance(eval_dataset, Mapping) else [eval_dataset]
        self.planned.prepare(train_dataset, evaluated, self.plans_shapes and self._packs(train_dataset))

    def _packs(self, dataset: Any) -> bool:
        """Return whether batches of ``dataset`` are packed: not where no shapes can be planned."""
        return self.packed and (self._is_unpadded or self.planned.can_plan(dataset))

    def _pad_because(self, obstacle: str | None) -> None:
        """Pad batches from here on if there is an obstacle to packing.

        Raises:
            UserError: If the user insists on packing.
        """
        if obstacle is None:
            return
        if self._args.packing == "true":
            raise UserError(
                f"packing=True is impossible: {obstacle}. Leave packing at 'auto', or remove the obstacle."
            )
        if self._args.packing == "auto":
            logger.warning(f"Batches are padded, not packed: {obstacle}.")
        self.padded_because = obstacle

    def _obstacle_in_settings(self, model: PreTrainedModel) -> str | None:
        args = self._args
        counts_tokens = getattr(args.include_num_input_tokens_seen, "value", args.include_num_input_tokens_seen)
        shards = args.fsdp or args.deepspeed_plugin or args.parallelism_config
        obstacles = {
            "packing is turned off": args.packing == "false",
            "neftune_noise_alpha scales its noise by the length of rows": args.neftune_noise_alpha,
            "long dialogues change positions beside them (see max_length)": outgrows_positions(model, args.max_length),
            "accelerate shards the model, with which packed rows were not tried": (
                shards or parse_flag_from_env("ACCELERATE_USE_FSDP")
            ),
            "include_num_input_tokens_seen counts padded rows (num_tokens in the logs needs none)": (
                counts_tokens not in (False, "no")
            ),
        }
        return next((obstacle for obstacle, is_there in obstacles.items() if is_there), None)

    def _obstacle_in_code(self) -> str | None:
        """Name the user's code that expects padded rows; None if there is none."""
        if self._collator is not None and type(self._collator) not in _COLLATORS:
            return "a data collator of your own makes the batches"
        method = self._reads_padded_rows()
        if method is None:
            return None
        if method.endswith("_dataloader") and self._args.train_batch_size > self._args.per_device_train_batch_size:
            return f"{method} is overridden; what its loader calls a batch is one over all devices of the mesh"
        return f"{method} is overridden, and such code expects padded rows"

    # ---- collators

    @property
    def padding_side(self) -> str:
        """The side of padding: today's collator pads on the right, whatever the tokenizer says."""
        return self._tokenizer.padding_side if self._old_columns else "right"

    @property
    def _pad_token_id(self) -> int:
        return self._tokenizer.pad_token_id

    def default_collator(self) -> Callable[[list[Any]], dict[str, Any]]:
        """Return TRL's collator for the data, for code that makes batches by itself."""
        multiple: Any = self._args.pad_to_multiple_of  # the config has read its text forms
        if self._old_columns:
            return RewardDataCollatorWithPadding(self._tokenizer, pad_to_multiple_of=multiple)
        if has_row_format(self._train_dataset, SOLUTION):
            return DataCollatorForTokenClassification(self._tokenizer, pad_to_multiple_of=multiple)
        return DataCollatorForPreference(self._pad_token_id, multiple)

    def collator(self, dataset: Any, batch_size: int, user_collator: Any) -> Callable[..., Any]:
        """Return the collator of ``dataset``: of packed or padded batches, or of TRL's dict for a user's code.

        Batches are padded from here on if the user has replaced something since the model was made to read packed
        rows. Where processes have parts of one model, the collator is given the rows of all, and makes this one's
        part: of planned shapes all have the same.

        Args:
            dataset: Prepared; a stream's examples may have more columns.
            batch_size: P, of one part.
            user_collator: The trainer's collator, which makes TRL's dict.

        Raises:
            UserError: If the user insists on packing.
        """
        self._collator = user_collator
        if self.packed:
            self._pad_because(self._obstacle_in_code() or own_code_of(self._whole_model))
        args, (index, count) = self._args, self._runtime.batch_part
        answers = length_stats(dataset).answers if is_prepared(dataset) else 2  # a stream has pairs
        rule = ComparisonRule(
            args.ties in TIES,
            args.average_over == "comparisons",
            args.margin_scale,
            args.attribute_loss_weights,
            answers,
            len(args.attributes or ()),
        )
        part = Part(batch_size, index, count) if count > 1 else None
        if self._packs(dataset) and self._is_unpadded:
            lay_out = partial(pack_unpadded, attention_crossover_length=self.planned.crossover)
        elif self._packs(dataset):
            rows = self.planned.rows(dataset, batch_size)
            lay_out = partial(pack, plan=rows, expands=self.planned.expands, part=(index, count))
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
            if self.plans_shapes:  # even a batch whose length is not planned has all rows
                lengths, part = lengths or (), Part(batch_size, index, count)
            multiple: Any = args.pad_to_multiple_of or 1
            lay_out = partial(pad, lengths=lengths, multiple=multiple)
        return BatchCollator(lay_out, self._pad_token_id, rule, part)

    # ---- shapes

    def _lengths_of(self, dataset: Any) -> tuple[int, ...] | None:
        """Choose the row lengths of padded batches of ``dataset`` on a device that compiles once per length.

        None where lengths are not planned: on other devices, for collators of users, and as `PlannedShapes` says.
        """
        is_ours = self._collator is None or isinstance(self._collator, _COLLATORS)
        return self.planned.lengths(dataset) if self.plans_shapes and is_ours else None

    @property
    def shapes(self) -> int | None:
        """The number of batch shapes in training; None where shapes are not planned."""
        if self.packed:
            return None if self._is_unpadded else len(self.planned.training_rows.shapes)
        lengths = self._lengths_of(self._train_dataset)
        return None if lengths is None else len(lengths)

    @property
    def accumulates(self) -> bool:
        """Whether some batches are computed in several micro-batches."""
        return self.packed and not self._is_unpadded and bool(self.planned.training_rows.accumulate)

    def describe(self) -> str:
        """Describe training batches for the log: packed or padded, their shapes, and why they are not packed."""
        if self.packed and self._is_unpadded:
            return "each packed into one row without padding"
        if self.packed:
            attention = "in rows of whole dialogues" if self.planned.expands else "through masks"
            return f"packed into rows of {self.planned.training_rows}; they attend {attention}"
        lengths = self._lengths_of(self._train_dataset)
        if lengths is None:
            return f"padded to their longest ({self.padded_because})"
        listed = " or ".join(map(str, lengths)) if len(lengths) <= 4 else f"one of {len(lengths)} lengths in"
        return f"padded to {listed} tokens ({self.padded_because})"
