"""Training and evaluation steps as functions, for a training loop of your own.

    state = TrainState("Qwen/Qwen3-0.6B", RewardConfig(...), train_dataset=pairs)
    for batch in state.batches():
        metrics = training_step(state, batch)
    state.save_model()

The steps call the methods that `RewardTrainer` calls in its loop, so losses, learning rates and weights are the same.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count, islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config.reward_config import RewardConfig
from ..errors import UserError
from ..modeling.losses import StepResult
from ..training.statistics import StepStatistics
from .reward_trainer import EvalDataset, RewardTrainer

#: Settings that only the loop of `RewardTrainer` obeys.
_OF_THE_TRAINERS_LOOP = (
    *("report_to", "resume_from_checkpoint", "push_to_hub", "load_best_model_at_end", "auto_find_batch_size"),
    *("training_time_limit", "save_interval_minutes", "enable_jit_checkpoint", "eval_on_start", "deepspeed"),
)


class TrainState:
    """A model, its optimizer and learning-rate schedule, on the devices and ready for the first step.

    The state is updated in place by `training_step`. Where several processes train together, each makes a state and
    calls the same functions in the same order. When to log, evaluate, save and stop is up to your loop: it reads
    `logging_steps`, `eval_steps` and the like from the config, or leaves them out.

    Args:
        model: A name (Hub id or folder), or a sequence classifier with one label, as for `RewardTrainer`.
        args: The settings; the object itself stays as it is.
        train_dataset: Pairs or rankings in any form that `RewardTrainer` accepts.
        eval_dataset: The same, for `evaluate` and `eval_batches`.
        processing_class: The tokenizer; by default the model's own.
        quantization_config: For a model given by name (plain torch on CUDA only).
        peft_config: Train adapters instead of the model.
        optimizer_cls_and_kwargs: An optimizer class and its arguments, instead of `args.optim`.

    Raises:
        UserError: A setting that only the trainer's own loop obeys, such as `report_to`; or any error of
            `RewardTrainer`.
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
        rejected = {name: value for name in _OF_THE_TRAINERS_LOOP if (value := getattr(args, name, None))}
        if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):  # stepped with the metrics of an evaluation
            rejected["lr_scheduler_type"] = args.lr_scheduler_type
        for name, value in rejected.items():
            raise UserError(f"{name}={value!r} needs RewardTrainer's own loop: leave it out, or use RewardTrainer.")
        if args.progress == "json":
            raise UserError("progress='json' needs RewardTrainer's own loop: print what `log` and `evaluate` return.")
        args = copy.copy(args)
        args.save_strategy = "no"
        parts: dict[str, Any] = {"quantization_config": quantization_config, "peft_config": peft_config}
        parts |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        self._steps = steps = _Steps(model, args, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs, **parts)
        steps.prepare()
        self.model, self.args, self.processing_class = steps.model, steps.args, steps.processing_class
        self.optimizer: Any = steps.optimizer
        self.schedule: Any = steps.lr_scheduler
        self._last: tuple[torch.Tensor | None, float] = None, 0.0  # norm and learning rate of the last step

    @property
    def step(self) -> int:
        """The number of updates so far."""
        return self._steps.state.global_step

    @property
    def max_steps(self) -> int:
        """The number of updates that the schedule is for: `max_steps`, or those of `num_train_epochs`."""
        return self._steps.state.max_steps

    def batches(self) -> Iterator[list[Any]]:
        """Yield the batches of each update, on the devices, in the trainer's order, until `step` is `max_steps`.

        An update has `gradient_accumulation_steps` batches, and fewer at the end of an epoch. So does the end of a
        pass over a stream, where transformers' loop adds the remaining gradients to the next update. Each call begins
        with the first epoch.

        Raises:
            UserError: A whole epoch has passed without a step.
        """
        loader = self._steps.callback_handler.train_dataloader
        for epoch in count():
            if epoch and not self.step:
                raise UserError("train_dataset gives no batch, or no `training_step` was called in a whole epoch.")
            loader.set_epoch(epoch)
            batches = iter(loader)
            while update := list(islice(batches, self.args.gradient_accumulation_steps)):
                yield update
                if self.step >= self.max_steps:
                    return

    def eval_batches(self, name: str | None = None) -> Iterator[Any]:
        """Yield the batches of `eval_dataset`, or of the one called ``name``, on the devices.

        The last one may be filled up with padding.
        """
        yield from self._steps.get_eval_dataloader(name)

    def log(self) -> dict[str, float]:
        """Return what the trainer logs: means and rates over the steps since the last call, over all processes.

        This waits for the devices. Between two calls nothing needs to be read from them.

        Raises:
            FloatingPointError: `nonfinite_limit` steps in a row had a NaN or infinite loss or gradient.
        """
        steps, (norm, rate) = self._steps, self._last
        steps._log_step(steps._tr_loss, norm, None, rate)
        return steps.state.log_history[-1]

    def evaluate(self) -> dict[str, float]:
        """Return the trainer's metrics of `eval_dataset`, over all processes. Names begin with ``eval_``."""
        with self._steps.paused():
            return self._steps.evaluate()

    def save_model(self, folder: str | None = None) -> None:
        """Write the model or its adapters, the tokenizer and the model card to ``folder``, or to `args.output_dir`."""
        with self._steps.paused(), self._steps.trl_tpu.step_state.one_by_one():
            self._steps.save_model(folder)


def training_step(state: TrainState, batch: Any) -> dict[str, torch.Tensor]:
    """Update the model: forward and backward of each batch, clipping, the optimizer's and the schedule's step.

    Nothing is read from the devices. After a step that is not finite weights stay as they are, as `nonfinite_limit`
    says.

    Args:
        state: Updated in place.
        batch: The batches of one update, from `TrainState.batches`, or one batch. Gradients are their mean. A dict
            of TRL's collator is a batch too.

    Returns:
        Scalars on the device: `loss`, `grad_norm` before clipping, and `accuracy`, `margin`, `tie_rate`,
        `mean_reward`, `min_reward` and `max_reward` of the rewards before the update. On the host: `learning_rate`,
        with which the update was made. Of several processes that share no mesh each has the numbers of its own pairs.
    """
    steps, batches = state._steps, batch if isinstance(batch, list | tuple) else [batch]
    steps.current_gradient_accumulation_steps, model = len(batches), steps.model_wrapped
    steps.sums, steps.loss_1 = copy.copy(steps.zero), steps.zero_1
    for number, inputs in enumerate(batches, start=1):
        steps.accelerator.sync_gradients = is_last = number == len(batches)
        with nullcontext() if is_last else steps.accelerator.no_sync(model):
            steps._tr_loss += steps.training_step(model, inputs)
        steps.floating_point_ops(inputs)  # ends the program of a micro-batch
    norm = steps._clip_grad_norm(model) if state.args.max_grad_norm > 0 else None
    state._last = norm, rate = steps._get_grad_norm(model, norm), steps._get_learning_rate()
    state.optimizer.step()
    if not steps.accelerator.optimizer_step_was_skipped:
        state.schedule.step()
    model.zero_grad()
    steps.state.global_step += 1
    metrics = {"loss": steps.loss_1[0], "grad_norm": norm, "learning_rate": torch.tensor(rate), **steps.sums.means()}
    steps.trl_tpu.runtime.step_boundary()
    steps.trl_tpu.recompiles.check(state.step)
    return metrics


def evaluation_step(state: TrainState, batch: Any) -> dict[str, torch.Tensor]:
    """Compute the loss and the rewards of a batch without dropout and gradients.

    Args:
        state: Its model is left in evaluation mode, which `training_step` ends.
        batch: From `TrainState.eval_batches`, or a dict of TRL's collator.

    Returns:
        On the device: the `loss` and the metrics of rewards that `training_step` returns; `rewards`, [P, K] of P
        pairs or rankings of K answers (of several attributes [P, A, K]), and `is_real`, [P], False for padding.
    """
    steps = state._steps
    with steps.paused():
        loss, result = steps._evaluated_step(steps._model_to_evaluate(), batch)
        assert result is not None  # the loss is ours
        sums = copy.copy(steps.zero)
        sums.update(result.rewards_SA, result.tokens_S, result.table)
        metrics = {"loss": loss, **sums.means(), "rewards": result.rewards_by_row, "is_real": result.present_P}
        steps.trl_tpu.runtime.step_boundary()
    return metrics


class _Steps(RewardTrainer):
    """The trainer without its loop: the state of a training, and the methods that transformers' loop calls."""

    def prepare(self) -> None:
        """Make optimizer and schedule, wrap the model, and begin to count."""
        self.callback_handler.callbacks = []  # of the trainer's loop
        weights = self.trl_tpu.statistics.attribute_weights
        self.zero = StepStatistics(self.trl_tpu.runtime, self.args.device, attribute_weights=weights)
        # data that each step adds to, so that a step of several micro-batches is the same programs
        self.sums, self.zero_1 = self.zero, self.zero.loss_sum()
        self.loss_1 = self.zero_1
        loader = self.get_train_dataloader()
        *_, self.state.max_steps = self.set_initial_training_values(self.args, loader)
        self._prepare_for_training(self.state.max_steps, loader, None)
        self.is_in_train, self._total_loss_scalar, self._globalstep_last_logged = True, 0.0, 0
        self.state.epoch = None  # type: ignore[assignment]  # logs then have none
        self._begin()

    def _step(self, model: nn.Module, inputs: Any) -> StepResult:
        result = super()._step(model, inputs)
        if self.model.training:
            self.sums.update(result.rewards_SA, result.tokens_S, result.table)
            self.loss_1 = self.loss_1 + result.loss.detach() / self.current_gradient_accumulation_steps
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count neither the compilations nor the time in the context as those of training steps."""
        ours = self.trl_tpu
        ours.recompiles.pause()
        ours.statistics.pause()
        yield
        ours.recompiles.resume()
        ours.statistics.resume()
