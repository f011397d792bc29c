"""The edges of transformers' Trainer at which state is written and read.

On XLA all hosts of a mesh take part, since each has only a part of the state, and the first one writes.
"""

import os
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer

from ..runtime import Runtime
from .checkpoint import load_optimizer, load_progress, save_optimizer, save_progress
from .export import export_model
from .metrics import RewardMetrics


class SavingTrainer(Trainer):
    """A Trainer that saves state from a mesh of devices and loads it back into its shards."""

    runtime: Runtime
    reward_metrics: RewardMetrics
    model: PreTrainedModel  # or one of peft, which hands its attributes on
    optimizer: Optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as safetensors with config and tokenizer beside it."""
        if self.runtime.name == "native":
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir or self.args.output_dir, state_dict=export_model(self.model, self.runtime))
        self.runtime.barrier()  # the other hosts may read it next
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
        if self.runtime.name == "native":
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            save_optimizer(self.optimizer, self.lr_scheduler, output_dir, self.runtime, self.args.should_save)
        save_progress(self.reward_metrics, output_dir, self.args.should_save)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.runtime.name == "native" or self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.runtime.barrier()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.runtime.name == "native":
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            torch_optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            load_optimizer(torch_optimizer, self.lr_scheduler, checkpoint, self.runtime)
        load_progress(self.reward_metrics, checkpoint)
