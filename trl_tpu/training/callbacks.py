"""What is done at the points of the loop where transformers calls callbacks only."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .agreement import HostAgreement
from .preemption import Preemption
from .recompile_guard import RecompileGuard


class StepCallback(TrainerCallback):
    """Tells components where a training and its steps begin and end.

    Args:
        begin: Called when the model and its state are ready to train.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        agreement: HostAgreement,
        preemption: Preemption,
        recompiles: RecompileGuard,
    ) -> None:
        self._begin = begin
        self._agreement, self._preemption, self._recompiles = agreement, preemption, recompiles

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begin()
        # a resumed run compares this with its own argument, and would warn of a change on every mesh
        state.train_batch_size = args.per_device_train_batch_size

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._agreement.postpone(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._recompiles.check()
        self._preemption.note_step(state.global_step, state.max_steps)
