"""What the trainer asks of its `BatchPlan`."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from .. import runtime
from ..data.collators import LEGACY_KEYS
from ..modeling.rewards import PackedPairs, PairBatch, read_batch
from ..training.loop import DeviceTrainer
from .batch_plan import BatchPlan
from .reward_config import RewardConfig


class PairBatching(DeviceTrainer):
    """The batching half of the reward trainer. Subclasses set what is declared here first."""

    args: RewardConfig
    processing_class: PreTrainedTokenizerBase
    _old_columns: bool
    batch_plan: BatchPlan

    def describe(self) -> str:
        """What trains where, for the start of a log: runtime, mesh, what is sharded, batches and their shapes."""
        precision = "bfloat16 over float32 weights" if self.args.bf16 else "the weights' own precision"
        return "\n".join(
            [
                f"Training on {self.runtime.hardware()}: {runtime.choice().reason}",
                f"Computing in {precision}",
                str(self.shard_report),
                f"Batches of {self._train_batch_size} pairs, {self.batch_plan.describe()}",
            ]
        )

    @property
    def _batch_layout(self) -> str:
        return self.batch_plan.layout

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:  # type: ignore[has-type]
            columns = list(LEGACY_KEYS) if self._old_columns else ["chosen_ids", "rejected_ids"]
            self._signature_columns = [*columns, "margin"]  # type: ignore[assignment]

    @property
    def planned_shapes(self) -> int | None:
        return self.batch_plan.shapes

    @property
    def has_partial_passes(self) -> bool:
        return self.batch_plan.accumulates

    def device_collator(self, dataset: Any, batch_size: int) -> Callable[[list[Any]], Any]:
        return self.batch_plan.collator(dataset, batch_size, self.data_collator)

    def read_batch(self, inputs: dict[str, Any]) -> PairBatch | PackedPairs:
        return read_batch(inputs, self.processing_class.pad_token_id, self.batch_plan.padding_side)
