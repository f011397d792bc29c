"""From pairs to batches of planned shapes: which collator, which lengths or rows, and how a batch is read."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .. import runtime
from ..data.collators import (
    LEGACY_KEYS,
    DataCollatorForPreference,
    PackedRows,
    PadToLengths,
    PairRows,
    RewardDataCollatorWithPadding,
    TightRow,
)
from ..modeling.adapters import without_adapters
from ..modeling.attention.packed_pairs import PackedPairs
from ..modeling.rewards import PairBatch
from ..packing.schedule import RowPlan
from ..training.loop import DeviceTrainer
from .batch_plan import attention_length, expands_rows, plan_rows_of, takes_tight_rows
from .builders import planned_lengths
from .reward_config import RewardConfig


class PairBatching(DeviceTrainer):
    """The batching half of the reward trainer. Subclasses set what is declared here first."""

    args: RewardConfig
    processing_class: PreTrainedTokenizerBase
    computes_own_loss: bool
    """Whether a subclass overrides `compute_loss`, and so expects TRL's padded layout."""
    _old_columns: bool
    _expands = False  # whether packed rows attend in rows of whole dialogues
    padded_because: str | None
    """What keeps batches from being packed; None where they are."""

    def describe(self) -> str:
        """What trains where, for the start of a log: runtime, mesh, what is sharded, batches and their shapes."""
        precision = "bfloat16 over float32 weights" if self.args.bf16 else "the weights' own precision"
        return "\n".join(
            [
                f"Training on {self.runtime.hardware()}: {runtime.choice().reason}",
                f"Computing in {precision}",
                str(self.shard_report),
                f"Batches of {self._train_batch_size} pairs, {self._describe_rows()}",
            ]
        )

    @property
    def _batch_layout(self) -> str:
        return "packed" if self.padded_because is None else "padded"

    def _describe_rows(self) -> str:
        if self.padded_because is None:
            if takes_tight_rows(self.model):
                return "each packed into one row without padding"
            attention = "in rows of whole dialogues" if self._expands else "through masks"
            return f"packed into rows of {self._training_plan}; they attend {attention}"
        lengths = self._training_lengths if self.runtime.compiles else None
        if lengths is None:
            shape = "their longest"
        else:
            listed = " or ".join(map(str, lengths)) if len(lengths) <= 4 else f"one of {len(lengths)} lengths in"
            shape = f"{listed} tokens"
        return f"padded to {shape} ({self.padded_because})"

    def _default_collator(self, args: RewardConfig) -> Any:
        multiple = cast("int | None", args.pad_to_multiple_of)  # the config has read its text forms
        if self._old_columns:
            return RewardDataCollatorWithPadding(self.processing_class, pad_to_multiple_of=multiple)
        return DataCollatorForPreference(self.processing_class.pad_token_id, multiple)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:  # type: ignore[has-type]
            columns = list(LEGACY_KEYS) if self._old_columns else ["chosen_ids", "rejected_ids"]
            self._signature_columns = [*columns, "margin"]  # type: ignore[assignment]

    @property
    def _padding_side(self) -> str:
        return self.processing_class.padding_side if self._old_columns else "right"

    @cached_property
    def _training_lengths(self) -> tuple[int, ...] | None:
        return planned_lengths(self.train_dataset, self.args)

    @property
    def _training_plan(self) -> RowPlan:
        return self._row_plan(self.train_dataset, self._train_batch_size)

    @property
    def _hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @cached_property
    def _row_plans(self) -> dict[tuple[str, int, bool], RowPlan]:
        return {}

    def _row_plan(self, dataset: Dataset, batch_size: int) -> RowPlan:
        """The rows of batches from ``dataset``, planned once for each batch size."""
        key = dataset._fingerprint, batch_size, self._expands
        if key not in self._row_plans:
            size, shards = self._hidden_size, self.mesh.batch_shards
            self._row_plans[key] = plan_rows_of(dataset, size, batch_size, shards, self.args, self._expands)
        return self._row_plans[key]

    def _packs(self, dataset: Any) -> bool:
        """Whether batches of ``dataset`` are packed; on XLA those of a stream are not: it has no shapes to plan."""
        return self.padded_because is None and (takes_tight_rows(self.model) or isinstance(dataset, Dataset))

    def prepare_rows(self) -> None:
        """Plan rows before training, choose how they attend, and see that a `row_length` of the user's can hold all.

        Raises:
            ValueError: If it is too short for a pair of the training or evaluation data, and not hours into a run; or
                if the user insists on attention that the model does not allow.
        """
        if not self.runtime.compiles or not self._packs(self.train_dataset):
            return
        base = without_adapters(self.model)
        self._expands = expands_rows(base, self._training_plan.longest, self.args)
        if self.args.row_length is None:
            return
        datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for dataset in datasets.values():
            if isinstance(dataset, Dataset) and self._packs(dataset):
                self._row_plan(dataset, self.args.eval_batch_size)

    @property
    def planned_shapes(self) -> int | None:
        if self.padded_because is None:
            return len(self._training_plan.shapes)
        return None if self._training_lengths is None else len(self._training_lengths)

    @property
    def has_partial_passes(self) -> bool:
        return self.padded_because is None and not takes_tight_rows(self.model) and bool(self._training_plan.partial)

    def device_collator(self, dataset: Any, batch_size: int) -> Callable[[list[Any]], Any]:
        """Packed rows; else, on XLA, pair rows of planned lengths, or TRL's layout for a subclass's own loss."""
        is_training = dataset is self.train_dataset
        if self._packs(dataset):
            pad_token_id = self.processing_class.pad_token_id
            if takes_tight_rows(self.model):
                return TightRow(pad_token_id, attention_length(self._hidden_size))
            plan = self._training_plan if is_training else self._row_plan(dataset, batch_size)
            return PackedRows(plan, batch_size, pad_token_id, self._expands)
        if not self.runtime.compiles:
            return self.data_collator
        # a stream's columns are removed example by example; a dataset's have been by then
        collate: Any = self.data_collator
        if not isinstance(dataset, Dataset):
            collate = self._get_collator_with_removed_columns(collate)
        if not isinstance(self.data_collator, DataCollatorForPreference | RewardDataCollatorWithPadding):
            return collate
        pad_token_id, side = self.processing_class.pad_token_id, self._padding_side
        lengths = self._training_lengths if is_training else planned_lengths(dataset, self.args)
        if lengths is not None:
            collate = PadToLengths(collate, lengths, pad_token_id, side)
        if self.computes_own_loss:
            return collate
        return PairRows(collate, batch_size, pad_token_id, side)

    def read_batch(self, inputs: dict[str, Any]) -> PairBatch | PackedPairs:
        if "subtree_end" in inputs:
            return PackedPairs.read(inputs)
        return PairBatch.read(inputs, self.processing_class.pad_token_id, self._padding_side)
