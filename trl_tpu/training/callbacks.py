"""What is done by callbacks of ours, and around those of others, at a step, a save and an end."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .logs import resume_sums
from .progress import say
from .recompile_guard import RecompileGuard

if TYPE_CHECKING:
    from .device_trainer import DeviceTrainer

_OWN = __package__.partition(".")[0]


def watches_saves(callback: TrainerCallback) -> bool:
    """Return whether a callback may look for what was saved; those of this package do not."""
    kind = type(callback)
    return kind.on_save is not TrainerCallback.on_save and kind.__module__.partition(".")[0] != _OWN


@contextlib.contextmanager
def keeping_all(args: TrainingArguments) -> Iterator[None]:
    """Let a Trainer that ends delete no checkpoint: with a limit of 1 it would delete all but the best.

    Also the one to resume from after a stop, and whatever else is named ``checkpoint-*``. There is no other way to
    tell it, as it reads the limit in the middle of its last method.
    """
    limit = args.save_total_limit
    args.save_total_limit = None
    try:
        yield
    finally:
        args.save_total_limit = limit


class StepEdges(TrainerCallback):
    """Calls components at points of the loop where only callbacks are called."""

    def __init__(self, trainer: "DeviceTrainer") -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        trainer.runtime.step_boundary()  # what placed and loaded the model is no part of the first step
        resume_sums(trainer)
        trainer.agreement.start(state.global_step)
        trainer.find_best_again()
        # a resumed run compares this with its own argument, and would warn of a change on every mesh
        state.train_batch_size = args.per_device_train_batch_size
        if trainer.runtime.compiles:
            shared = int(trainer._accumulates)
            shapes, announce = trainer.batch_plan.shapes, partial(say, trainer)
            trainer.recompiles = RecompileGuard(trainer.runtime, shapes, shared, announce)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.nonfinite.begin_step(self._trainer._tr_loss)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.agreement.postpone(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.recompiles.check()
        self._trainer.preemption.note_step(state.global_step, state.max_steps)
