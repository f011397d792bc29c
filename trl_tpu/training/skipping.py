"""The edges of transformers' Trainer at which steps that are not finite are found, left out, and stop a run."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn

from .nonfinite import Counted, drop_gradients
from .optimizer import passes_of
from .replay import REPLAY_FILE, HeldBatches, Replay, same_tensors, write_replay
from .stops import StoppingTrainer


class SkippingTrainer(StoppingTrainer):
    """A Trainer that skips the update of a step whose loss or gradient is NaN or infinite.

    The step counts as one for everything else: the learning rate's schedule, logs, saves. What is logged as its loss
    is the mean over the other steps. The run stops at the log after the `nonfinite_limit`-th such step in a row, since
    only a log reads the device; the end of training is a log. With a limit of 0 all is as in transformers.
    """

    nonfinite_limit: int = 0
    _known_loss: torch.Tensor | None = None
    device_collator: Callable[[Any, int], Callable[[list[Any]], Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held = HeldBatches()

    @property
    def skips_nonfinite(self) -> bool:
        """Whether this run does; accelerate's FSDP and DeepSpeed, and a loss scale, have ways of their own."""
        others = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.accelerator.scaler is not None
        return self.nonfinite_limit > 0 and not others

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        self.reward_metrics.steps.reset()
        self._held.clear()
        return super()._init_training_state(*args, **kwargs)

    # ---- within the step

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One pass, of which the loss is seen to be finite when the step ends."""
        if not self.skips_nonfinite:
            return super().training_step(model, inputs, num_items_in_batch)
        self._held.add(self.state.global_step + 1, inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.reward_metrics.steps.see(loss)
        return loss

    def reset_loss(self) -> None:
        """Start the loss sum anew, as a vector: XLA would bake a scalar 0 into the next step's program."""
        self._tr_loss, self._loss_before = (self.runtime.to_device(torch.zeros(1), self.args.device) for _ in range(2))
        self._known_loss = self._tr_loss

    def begin_step(self) -> None:
        """Have the sum of the losses up to here, which is that after the step too if it is not finite.

        `reset_loss` and the step before provide it; whatever else sets the sum, as resuming may, costs an execution.
        """
        if self._tr_loss is not self._known_loss:
            self._loss_before, self._known_loss = self._tr_loss.clone(), self._tr_loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient's norm, which says whether the gradient is finite; the update comes next."""
        norm = super()._get_grad_norm(model, grad_norm)
        if not self.skips_nonfinite:
            return norm
        counts = self.reward_metrics.steps
        finite_1 = counts.verdict(torch.as_tensor(norm, device=self.args.device))
        if self.accelerator.num_processes > 1:  # each has a loss of its own
            finite_1 = self.accelerator.reduce((~finite_1).int()) == 0
        counts.end_step(finite_1)
        self._loss_before = torch.where(finite_1, self._tr_loss, self._loss_before)
        self._tr_loss = self._known_loss = self._loss_before.clone()  # what is added to it is added in place
        if not (self.runtime.compiles or finite_1):
            drop_gradients(getattr(self.optimizer, "optimizer", self.optimizer))
        return norm

    # ---- on the host

    def stop_if_nonfinite(self, counted: Counted) -> None:
        """End the run if too many steps in a row were not finite, with the first of them named and saved.

        Raises:
            FloatingPointError: They were.
        """
        if not counted.reached_at:
            self._held.drop_before(self.state.global_step - self.nonfinite_limit + 2)  # a row may have begun there
            return
        last = self.state.global_step - counted.taken + counted.reached_at
        first = last - self.nonfinite_limit + 1
        weights = self._keep_weights()
        folder = Path(self._get_output_dir(None), f"nonfinite-step-{first}")
        if self.accelerator.num_processes > 1:
            folder /= f"process-{self.accelerator.process_index}"
        saved = self._save_batch(first, folder, weights)
        raise FloatingPointError(
            f"The loss or the gradient of {self.nonfinite_limit} steps in a row, {first} to {last}, was NaN or "
            f"infinite (nonfinite_limit={self.nonfinite_limit}). No update was taken from them: the weights are "
            f"finite still, those after step {first - 1} ({weights}). {saved} Look for faults in these pairs and in "
            "the model's own weights, or lower learning_rate; nonfinite_limit=0 trains on without these checks."
        )

    def _keep_weights(self) -> str:
        """Save a checkpoint, unless the run saves none; in a word, where the weights are."""
        if self.args.save_strategy == "no":
            return "not saved, as save_strategy='no'"
        self._save_checkpoint(self.model, None)
        self.saves.wait()
        return f"in checkpoint-{self.state.global_step}"

    def _save_batch(self, step: int, folder: Path, weights: str) -> str:
        """Write the batch of ``step``; says for the error what was in it and where it is."""
        rows = self._rows_of(step)
        held, made = self._held.get(step), None if rows is None else self._make_batch(rows)
        passes = held or made
        if passes is None:
            return "Its pairs are unknown, being of a stream and long gone: with a lower logging_steps they are kept."
        if held is not None and made is not None and not same_tensors(held, made, self.runtime):
            rows = None  # the sampler's order was another one, or the collator draws lots
        what = Replay(
            step=step,
            steps_in_a_row=self.nonfinite_limit,
            rows=None if rows is None else [row for batch in rows for row in batch],
            batch="as the step took it" if held else "made again from these rows, the sampler's at this step",
            weights=weights,
        )
        writes = self.args.should_save or self.accelerator.num_processes > 1
        pairs = write_replay(folder, passes, what, self.runtime, writes)
        return f"{pairs} The batch is saved in {folder}, where {REPLAY_FILE} says how to run it again."

    def _rows_of(self, step: int) -> list[list[int]] | None:
        """The rows of `train_dataset` in the micro-batches of ``step``, in the sampler's order; None for a stream."""
        loader: Any = self.callback_handler.train_dataloader
        if not isinstance(self.train_dataset, datasets.Dataset) or getattr(loader, "batch_sampler", None) is None:
            return None
        accumulated = self.args.gradient_accumulation_steps
        epoch, update = divmod(step - 1, -(-len(loader) // accumulated))
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        return list(islice(loader.batch_sampler, update * accumulated, (update + 1) * accumulated))

    def _make_batch(self, rows: list[list[int]]) -> list[dict[str, Any]]:
        """The passes of the micro-batches that hold these rows, on the host."""
        assert isinstance(self.train_dataset, datasets.Dataset)
        collate = self.device_collator(self.train_dataset, self._train_batch_size)
        pairs = self._remove_unused_columns(self.train_dataset, description="training")
        return [part for batch in rows for part in passes_of(collate(pairs.__getitems__(batch)))]

    # ---- the end of the run

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Take the steps that are not finite out of the mean that `train_loss` is, also those since the last log."""
        if self.skips_nonfinite:
            fetched, open_loss = self.runtime.fetch([self.reward_metrics.steps.device_counts, self._tr_loss])
            counted = self.reward_metrics.steps.close(fetched)
            self.stop_if_nonfinite(counted)
            nonfinite = self.reward_metrics.steps.nonfinite
            if nonfinite:
                steps = self.state.global_step - self._initial_global_step
                total = self._total_loss_scalar + open_loss.item()
                self.reset_loss()
                self._total_loss_scalar = total * steps / (steps - nonfinite) if steps > nonfinite else float("nan")
            self._held.clear()
        return super()._finalize_training(*args, **kwargs)
