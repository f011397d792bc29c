"""Training and evaluation steps as functions, for custom training loops.

    state = TrainState("Qwen/Qwen3-0.6B", RewardConfig(...), train_dataset=pairs)
    for batch in state.batches():
        metrics = training_step(state, batch)
    state.save_model()

A step is the same function as in the loop of `RewardTrainer`: losses, learning rates and weights are the same.
"""

import copy
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ..compat.arguments import SuggestsNewNames, suggests_new_names
from ..config.checks import check_limits
from ..config.reward_config import RewardConfig
from ..data.loader import begin_epoch
from ..errors import UserError
from ..modeling.losses import StepResult
from ..training.device_trainer import Run
from ..training.statistics import StepStatistics
from .reward_trainer import EvalDataset, RewardTrainer


class TrainState(SuggestsNewNames):
    """A model, its optimizer and learning rate schedule, on the devices and ready for the first step.

    `training_step` updates the state in place. If several processes train together, each of them makes a state and
    calls the same functions in the same order. Your loop decides when to log, evaluate, save and stop. It may read
    `logging_steps`, `eval_steps` and similar settings from the config; nothing else reads them.

    Args:
        model: Name of a model (Hub id or folder), or a sequence classifier with one label, as for `RewardTrainer`.
        args: The settings. The object is not changed.
        train_dataset: Rows in any form that `RewardTrainer` accepts.
        eval_dataset: Data in the same form for `evaluate` and `eval_batches`, or a dict of such datasets.
        processing_class: The tokenizer. By default the tokenizer saved with the model.
        quantization_config: Quantization of a model given by name (plain torch on CUDA only).
        peft_config: Configuration of adapters to train instead of the full model.
        optimizer_cls_and_kwargs: An optimizer class and its keyword arguments that replace `args.optim`.

    Raises:
        UserError: If a setting needs the trainer's loop, such as `report_to`, or if `RewardTrainer` raises it.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: RewardConfig,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: EvalDataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        quantization_config: Any | None = None,
        peft_config: Any | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    ) -> None:
        check_limits(args, "loop")
        args = copy.copy(args)
        args.save_strategy = "no"
        parts: dict[str, Any] = {"quantization_config": quantization_config, "peft_config": peft_config}
        parts |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        self._trainer = trainer = _StepTrainer(model, args, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs, **parts)
        Trainer.train(trainer)  # applies the settings to the model, and starts a run instead of taking its steps
        self.model, self.args, self.processing_class = trainer.model, trainer.args, trainer.processing_class
        self.optimizer: Any = trainer.optimizer
        self.schedule: Any = trainer.lr_scheduler
        self._last: tuple[torch.Tensor | None, float] = None, 0.0  # gradient norm and learning rate of the last step

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self._trainer.state.global_step

    @property
    def max_steps(self) -> int:
        """Number of updates in the schedule: `max_steps`, or the updates of `num_train_epochs`."""
        return self._trainer.state.max_steps

    def batches(self) -> Iterator[list[Any]]:
        """Yield the batches of each update until `step` is `max_steps`, on the devices and in the trainer's order.

        An update has `gradient_accumulation_steps` batches, or fewer at the end of an epoch. The same holds at the end
        of a pass over a stream, unlike in the trainer's loop: it adds the remaining gradients to the next update.
        Each call begins with the first epoch.

        Raises:
            UserError: If an epoch has passed without a step.
        """
        loader = self._trainer.run.loader
        for epoch in count():
            if epoch and not self.step:
                raise UserError("train_dataset has no batches, or `training_step` was not called in a whole epoch.")
            begin_epoch(loader, epoch)
            batches = iter(loader)
            while update := list(islice(batches, self.args.gradient_accumulation_steps)):
                yield update
                if self.step >= self.max_steps:
                    return

    def eval_batches(self, name: str | None = None) -> Iterator[Any]:
        """Yield the batches of `eval_dataset`, or of the evaluation dataset ``name``, on the devices.

        The last batch may contain padding.
        """
        yield from self._trainer.get_eval_dataloader(name)

    def log(self) -> dict[str, float]:
        """Return the trainer's log: means and rates over the steps since the last call and over all processes.

        This waits for the devices. Between two calls no value has to be read from them.

        Raises:
            FloatingPointError: If `nonfinite_limit` consecutive steps had a NaN or infinite loss or gradient.
        """
        trainer, (norm, rate) = self._trainer, self._last
        trainer._log_step(norm, trainer.run.start_time, rate)
        return trainer.state.log_history[-1]

    def evaluate(self) -> dict[str, float]:
        """Return the trainer's metrics of `eval_dataset` over all processes. Their names begin with ``eval_``."""
        with self._trainer.trl_tpu.paused():
            return self._trainer.evaluate()

    def save_model(self, folder: str | None = None) -> None:
        """Write the model or its adapters, the tokenizer and the model card.

        Args:
            folder: Folder to write to. By default `args.output_dir`.
        """
        with self._trainer.trl_tpu.paused(), self._trainer.trl_tpu.step_state.unstacked():
            self._trainer.save_model(folder)


@suggests_new_names
def training_step(state: TrainState, batch: Any) -> dict[str, torch.Tensor]:
    """Update the model: forward and backward of each batch, gradient clipping, optimizer step and schedule step.

    On devices that compile, no value is read from them. A step with a NaN or infinite loss or gradient does not change
    the weights, unless `nonfinite_limit` is 0.

    Args:
        state: The state; updated in place.
        batch: The list of batches of one update, from `TrainState.batches`, or a single batch. Their gradients are
            averaged. Dicts from TRL's collator are accepted.

    Returns:
        Scalars on the device: `loss`, `grad_norm` before clipping, and `accuracy`, `margin`, `tie_rate`,
        `mean_reward`, `min_reward` and `max_reward` of the rewards before the update. `learning_rate` of the update is
        on the host. If processes share no mesh, each process returns the numbers of its own rows.
    """
    trainer, batches = state._trainer, batch if isinstance(batch, list | tuple) else [batch]
    trainer.sums = sums = copy.copy(trainer.zero_sums)
    step = trainer._update(batches)
    assert step is not None  # no callback ends it early
    state._last = norm, rate = step
    logs = {"loss": sums.step_loss_1[0], "grad_norm": norm, "learning_rate": torch.tensor(rate), **sums.means()}
    trainer.trl_tpu.runtime.step_boundary()
    trainer.trl_tpu.recompiles.check(state.step)
    return logs


@suggests_new_names
def evaluation_step(state: TrainState, batch: Any) -> dict[str, torch.Tensor]:
    """Compute the loss and the rewards of a batch without dropout and gradients.

    Args:
        state: The state. Its model stays in evaluation mode until the next `training_step`.
        batch: A batch from `TrainState.eval_batches`, or a dict from TRL's collator.

    Returns:
        Tensors on the device: `loss` and the reward metrics of `training_step`; `rewards` of P rows with K
        answers, [P, K] or with several attributes [P, A, K]; and `is_real`, [P], False for padding.
    """
    trainer = state._trainer
    with trainer.trl_tpu.paused():
        loss, result = trainer._evaluation_step(trainer._model_to_evaluate(), batch)
        assert result is not None  # known because compute_loss is not overridden
        sums = copy.copy(trainer.zero_sums)
        sums.update(result.rewards_SA, result.tokens_S, result.table)
        metrics = {"loss": loss, **sums.means(), "rewards": result.rewards_by_row, "is_real": result.present_P}
        trainer.trl_tpu.runtime.step_boundary()
    return metrics


class _StepTrainer(RewardTrainer):
    """A trainer whose `Trainer.train` stops before the first step."""

    run: Run

    def _inner_training_loop(self, *_: Any, **__: Any) -> Any:
        """Start a run and the statistics of its steps."""
        self.callback_handler.callbacks = []  # they belong to the trainer's loop
        self.run = self._start()
        self._begin()
        self.state.epoch = None  # type: ignore[assignment]  # leaves the epoch out of logs
        weights = self.trl_tpu.statistics.attribute_weights
        # every step starts from these device values, so its micro-batches always run the same programs
        self.zero_sums = StepStatistics(self.trl_tpu.runtime, self.args.device, attribute_weights=weights)
        self.sums = self.zero_sums

    def _loss_and_rewards(self, model: nn.Module, inputs: Any) -> StepResult:
        result = super()._loss_and_rewards(model, inputs)
        if self.model.training:
            self.sums.update(result.rewards_SA, result.tokens_S, result.table)
            self.sums.add_loss(result.loss.detach() / self.current_gradient_accumulation_steps)
        return result
