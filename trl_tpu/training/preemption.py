"""Stops that are not the end, by a SIGTERM or a time limit: both save at the end of the step, to go on from there.

SIGTERM is what a machine that is taken away sends: Compute Engine and Kubernetes directly, and torch_xla's own
preemption notice (`PreemptionSyncManager`) is a handler of that signal and nothing else. We handle it ourselves, since
its handler could neither be taken back nor let a second signal through.
"""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from .. import forks
from ..errors import NOT_SAVED, UNFINISHED
from .agreement import HostAgreement

logger = logging.getLogger(__name__)

SIGTERM = "SIGTERM"
TIME_LIMIT = "training_time_limit"
SAVE_INTERVAL = "save_interval_minutes"


class Unfinished(SystemExit):
    """Training was stopped before its end and has saved a checkpoint to go on from; uncaught, the exit status is 75.

    Where that checkpoint could not be saved, the status is 74, and an earlier one is to go on from.

    `train()` raises it after a SIGTERM: what a script does after training is for a trained model, and takes time that
    a process told to end does not have.

    Attributes:
        reason: What stopped it.
        checkpoint: The folder, or URL, to resume from.
        saved: Whether it could be saved.
    """

    def __init__(self, reason: str, checkpoint: str, saved: bool = True) -> None:
        super().__init__(UNFINISHED if saved else NOT_SAVED)
        self.reason = reason
        self.checkpoint = checkpoint
        self.saved = saved

    def __str__(self) -> str:
        outcome = "is to go on from" if self.saved else "could not be saved"
        return f"{self.reason} stopped training; {self.checkpoint} {outcome}"


class EvaluationCutShort(Exception):
    """An evaluation that is not waited for, since the process was told to end."""


class Preemption:
    """Saves and stops a run before its time: at a SIGTERM, a time limit, an interval between saves.

    What one process requests at the end of a step is decided on by all of them together.

    Args:
        time_limit: How long one `train()` may take; None for as long as it takes.
        save_interval: How long after the last save to save again; None for never.
    """

    def __init__(self, time_limit: timedelta | None, save_interval: timedelta | None) -> None:
        self._time_limit, self._save_interval = time_limit, save_interval
        self.start()

    def start(self) -> None:
        """Begin to train."""
        self.stopped_by: str | None = None
        """What ended training before its end: `SIGTERM` or `TIME_LIMIT`."""
        self.told_to_stop = False
        """Whether a SIGTERM has come to this process."""
        self.requests = dict.fromkeys((SIGTERM, TIME_LIMIT, SAVE_INTERVAL), False)
        """What this process requested at the end of the last step."""
        self.cuts_evaluations_short = False
        """Whether an evaluation that runs now ends at a SIGTERM by `EvaluationCutShort`, and its step is saved."""
        self._saved_step = -1
        self._started = self._last_save = time.monotonic()

    @contextlib.contextmanager
    def hearing_sigterm(self, listens: bool) -> Iterator[None]:
        """Note the first SIGTERM; a second does what it would have done without us.

        Args:
            listens: False where somebody else handles it. Only the main thread may have a handler.
        """
        self.start()
        if not listens or threading.current_thread() is not threading.main_thread():
            yield
            return

        # None is a handler that Python did not install and cannot put back
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def note(*_: object) -> None:
            self.told_to_stop = True
            signal.signal(signal.SIGTERM, before)

        forks.end_by_sigterm()
        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def note_step(self, step: int, max_steps: int) -> None:
        """Note the end of ``step``, and what is requested by then."""
        now = time.monotonic()
        self.requests = {
            SIGTERM: self.told_to_stop,
            TIME_LIMIT: _is_over(self._time_limit, now - self._started) and step < max_steps,
            SAVE_INTERVAL: _is_over(self._save_interval, now - self._last_save),
        }

    def decide(
        self, agreement: HostAgreement, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> bool:
        """Let all processes log, evaluate, save and stop alike; return whether this step must be saved."""
        requests = agreement.decide(args, state, control, self.requests)
        if self.stopped_by is not None:  # what the end of an epoch, cut short or not, asks for once more
            control.should_log = control.should_evaluate = control.should_save = False
            return True
        reason = next((name for name in (SIGTERM, TIME_LIMIT) if requests[name]), None)
        if reason is not None:
            self.stop(reason, args, state, control)
        control.should_save |= requests[SAVE_INTERVAL] and not self.has_saved(state.global_step)
        return reason is not None or requests[SAVE_INTERVAL]

    def stop(self, reason: str, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Decide to save, and to stop. After the last step of an epoch, what its end asks for is done here and now."""
        self.stopped_by = reason
        if float(state.epoch or 0).is_integer():
            DefaultFlowCallback().on_epoch_end(args, state, control)
        if reason == SIGTERM and control.should_evaluate:
            control.should_evaluate = False
            logger.warning("The evaluation due at step %s is left out, to save and stop in time.", state.global_step)
        control.should_save = control.should_training_stop = True

    def note_save(self, step: int) -> None:
        """Note that a checkpoint of ``step`` was begun."""
        self._saved_step, self._last_save = step, time.monotonic()

    def has_saved(self, step: int) -> bool:
        """Return whether a checkpoint of ``step`` was begun."""
        return self._saved_step == step


def _is_over(patience: timedelta | None, seconds: float) -> bool:
    return patience is not None and seconds >= patience.total_seconds()
