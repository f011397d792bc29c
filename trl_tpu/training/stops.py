"""Stops that are not the end, by a SIGTERM or a time limit: both save at the end of the step, to go on from there.

SIGTERM is what a machine that is taken away sends: Compute Engine and Kubernetes directly, and torch_xla's own
preemption notice (`PreemptionSyncManager`) is a handler of that signal and nothing else. We handle it ourselves, since
its handler could neither be taken back nor let a second signal through; hosts agree as `TogetherTrainer` has them.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback
from transformers.utils import logging

from ..checkpoint.background import NOT_SAVED
from .together import TogetherTrainer

logger = logging.get_logger(__name__)

#: The exit status of a run that stopped with a checkpoint and should be started again: EX_TEMPFAIL of sysexits.h.
UNFINISHED = 75

SIGTERM = "SIGTERM"
TIME_LIMIT = "training_time_limit"
SAVE_INTERVAL = "save_interval_minutes"

_DURATION = re.compile(r"(?:([1-9][0-9]{0,5})d)?(?:([1-9][0-9]{0,5})h)?(?:([1-9][0-9]{0,5})m)?")
# where a checkpoint's trainer_state.json says that, and how, the run was stopped
_NOTE = "StoppingTrainer"


def parse_duration(text: object) -> timedelta:
    """A duration such as "2h30m", "1d" or "90m".

    Raises:
        ValueError: Any other spelling.
    """
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if not match or not match[0]:
        raise ValueError(
            f"{text!r} is no duration: write whole numbers of days, hours and minutes with d, h and m, in this order "
            "and without spaces, and leave out what is 0: '2h30m', '1d', '90m'."
        )
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes)


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


class StoppingTrainer(TogetherTrainer):
    """A Trainer that saves and stops at the end of the step in which it is told to, or runs out of time.

    After a SIGTERM nothing but that save is waited for: an evaluation is broken off or left out, and made up for when
    training resumes. A second SIGTERM does what it would have done without us.
    """

    time_limit: timedelta | None = None  # of one train()
    save_interval: timedelta | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stopped_by: str | None = None
        self._told_to_stop = False
        self._breaks_off_evaluation = self._makes_up = False
        self._saved_step = -1
        self._started = self._last_save = time.monotonic()
        self._call: tuple[Any, ...] = ()
        self.add_callback(_Edges(self))

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers does; `stopped_by` says whether a time limit ended it.

        Raises:
            Unfinished: After a SIGTERM.
        """
        self.stopped_by, self._told_to_stop, self._saved_step = None, False, -1
        self.wishes = dict.fromkeys((SIGTERM, TIME_LIMIT, SAVE_INTERVAL), False)
        self._started = self._last_save = time.monotonic()
        self._call = (trial, ignore_keys_for_eval)
        with self._hearing_sigterm():
            output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        if self.stopped_by == SIGTERM or (self.stopped_by is not None and self._told_to_stop):
            raise self.unfinished(SIGTERM)
        if self._told_to_stop:  # after the last step, where we do not save
            signal.raise_signal(signal.SIGTERM)
        return output

    @property
    def stop_checkpoint(self) -> str:
        """The folder, or URL, that was saved at the last step's end, if that was a stop."""
        run = self._get_output_dir(self._call[0]) if self.remote is None else self.remote.url
        return os.path.join(run, f"checkpoint-{self.state.global_step}")

    def unfinished(self, reason: str) -> Unfinished:
        """What to raise after a stop."""
        return Unfinished(reason, self.stop_checkpoint, self.stop_checkpoint not in self.saves.failed)

    @contextlib.contextmanager
    def _hearing_sigterm(self) -> Iterator[None]:
        """Note the first SIGTERM. Only the main thread may have a handler; and transformers' own comes first."""
        if threading.current_thread() is not threading.main_thread() or self.args.enable_jit_checkpoint:
            yield
            return

        # None is a handler that Python did not install and cannot put back
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def note(*_: Any) -> None:
            self._told_to_stop = True
            signal.signal(signal.SIGTERM, before)

        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    # ---- at a step's end

    def _wish(self) -> None:
        """What this host wishes, before all hosts are asked."""
        now = time.monotonic()
        due = {TIME_LIMIT: (self.time_limit, self._started), SAVE_INTERVAL: (self.save_interval, self._last_save)}
        for name, (patience, since) in due.items():
            self.wishes[name] = patience is not None and now - since >= patience.total_seconds()
        self.wishes[TIME_LIMIT] &= self.state.global_step < self.state.max_steps
        self.wishes[SIGTERM] = self._told_to_stop

    def _agree(self) -> None:
        super()._agree()
        if self.stopped_by is not None:  # what the end of an epoch, broken off or not, asks for once more
            self.control.should_log = self.control.should_evaluate = self.control.should_save = False
            return
        reason = next((name for name in (SIGTERM, TIME_LIMIT) if self.wishes[name]), None)
        if reason is not None:
            self._stop(reason)
        self.control.should_save |= self.wishes[SAVE_INTERVAL] and self._unsaved

    def _stop(self, reason: str) -> None:
        """Decide to save, and to stop. After the last step of an epoch, what its end asks for is done here and now."""
        control, state = self.control, self.state
        self.stopped_by = reason
        if float(state.epoch or 0).is_integer():
            DefaultFlowCallback().on_epoch_end(self.args, state, control)
        note = {"stopped_by": reason, "evaluation_due": reason == SIGTERM and control.should_evaluate}
        if reason == SIGTERM:
            control.should_evaluate = False
        control.should_save = control.should_training_stop = True
        # in the form of a callback's state; transformers ignores those that it has no callback for
        notes: Any = state.stateful_callbacks
        notes[_NOTE] = {"args": {}, "attributes": note}

    @property
    def _unsaved(self) -> bool:
        return self._saved_step != self.state.global_step

    def _log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._breaks_off_evaluation = True
        try:
            super()._log_save_evaluate(*args, **kwargs)
        except _BrokenOff:
            if self._makes_up:
                raise
            self._stop(SIGTERM)
        finally:
            self._breaks_off_evaluation = False
        if (self.stopped_by is not None or self.wishes[SAVE_INTERVAL]) and self._unsaved:
            # the evaluation before it was broken off; or save_strategy="best" has taken the wish away
            self.control.should_save = True
            super()._log_save_evaluate(*args, **kwargs)

    # ---- at other points

    def _between_evaluated_batches(self) -> None:
        if not self._breaks_off_evaluation:
            return
        if any(self._all_gather_object(self._told_to_stop)):
            raise _BrokenOff

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Leave training's random numbers as they are, of which a loader takes one, wherever it is made up for."""
        with torch.random.fork_rng(devices=[]):
            return super()._evaluate(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._make_up()  # whereupon a callback may wish to stop
        # a run that is resumed at its end would take one more step, as the loop looks for the end after each
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _make_up(self) -> None:
        """Evaluate where the run that this one resumes was stopped, if it could not.

        Raises:
            Unfinished: It is told to stop again; the checkpoint that it resumed from is all there is to keep.
        """
        notes: Any = self.state.stateful_callbacks
        left = notes.pop(_NOTE, None)
        if left is None or not left["attributes"]["evaluation_due"] or self.args.eval_strategy == "no":
            return
        trial, ignore_keys = self._call
        self.control.should_evaluate = self._makes_up = True
        try:
            self._maybe_log_save_evaluate(
                self._tr_loss, None, self.model, trial, self.state.epoch, ignore_keys, start_time=time.time()
            )
        except _BrokenOff:
            raise Unfinished(SIGTERM, str(self._resumed_from)) from None
        finally:
            self._makes_up = False

    # ---- after the last step

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.stopped_by is None:
            self._make_up()  # where no step was left to train
            return super()._finalize_training(*args, **kwargs)
        self.saves.wait()  # one that is written may delete older ones by the limit
        logger.warning(
            "At step %s of %s: %s.", self.state.global_step, self.state.max_steps, self.unfinished(self.stopped_by)
        )
        with _keeping_two(self.args):
            return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        if self.stopped_by != SIGTERM:
            super()._load_best_model()


class _BrokenOff(Exception):
    """An evaluation that is not waited for."""


class _Edges(TrainerCallback):
    """Points inside the loop where only callbacks are called."""

    def __init__(self, trainer: StoppingTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._wish()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trainer._between_evaluated_batches()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._saved_step = state.global_step
        self._trainer._last_save = time.monotonic()


@contextlib.contextmanager
def _keeping_two(args: TrainingArguments) -> Iterator[None]:
    """Keep the checkpoint to resume from: with a limit of 1 a Trainer that ends deletes all but the best."""
    limit = args.save_total_limit
    args.save_total_limit = 2 if limit == 1 else limit
    try:
        yield
    finally:
        args.save_total_limit = limit
