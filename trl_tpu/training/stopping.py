"""How training stops: by SIGTERM, by a time limit, by agreement of all hosts."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from ..errors import NOT_SAVED, UNFINISHED
from ..runtime import Runtime, Value

logger = logging.getLogger(__name__)


class RecompileGuard:
    """Counts the programs that training steps compile, against the number that was planned.

    A planned run compiles one program for each distinct batch shape, of which it sees at most `planned_shapes`; where
    steps are not recorded, any number in the first two steps of each planned shape, and in the step after those.
    Compiles outside steps (evaluation, saving) are not counted: wrap those in `pause` and `resume`.

    Args:
        runtime: Counts compiles.
        announce: Told what is about to be compiled, and "" when it has been.
    """

    def __init__(self, runtime: Runtime, announce: Callable[[str], None] = lambda what: None) -> None:
        self._runtime, self._announce = runtime, announce
        self._announced = False
        self.start(None)

    def start(self, planned_shapes: int | None, shared_programs: int = 0) -> None:
        """Begin a run.

        Args:
            planned_shapes: How many batch shapes the loader plans; None when it cannot know.
            shared_programs: Programs that are compiled once (the optimizer's update, when gradients accumulate).
        """
        self._planned_shapes, self._allowed = planned_shapes, shared_programs + (planned_shapes or 1)
        self._seen: Counter[str] = Counter()
        self._evaluated: Counter[str] = Counter()
        self._compiled = self._warned_at = self._starting = 0
        self.resume()

    def see(self, batch: Mapping[str, Any], updates: bool = True) -> None:
        """Note the shapes of a batch that a step is about to use, when the one before it has run.

        Args:
            updates: Whether its program can be one that also updates the weights, which is another program.
        """
        planned = "" if self._planned_shapes is None else f" of {self._planned_shapes}"
        self._note(self._seen, _shapes_of(batch) + ("" if updates else ", without an update"), planned)

    def see_evaluated(self, batch: Mapping[str, Any]) -> None:
        """Note the shapes of a batch that an evaluation is about to use, only to tell what it waits for."""
        self._note(self._evaluated, _shapes_of(batch), " for evaluation")

    def _note(self, seen: Counter[str], shapes: str, which: str) -> None:
        if self._runtime.compile_count() is None:
            return
        self.settle()
        seen[shapes] += 1
        if seen is self._seen and seen[shapes] <= 2 and len(seen) <= (self._planned_shapes or 1):
            self._starting = 2
        if seen[shapes] == 1:
            self._announce(f"compiling shape {len(seen)}{which}")
            self._announced = True

    def settle(self) -> None:
        """Note that whatever was recorded has run."""
        if self._announced:
            self._announce("")
        self._announced = False

    def pause(self) -> None:
        """Count what steps compiled so far; what compiles until `resume` is somebody else's."""
        self._compiled += (self._runtime.compile_count() or 0) - self._mark

    def resume(self) -> None:
        """Count again."""
        self._mark = self._runtime.compile_count() or 0

    def check(self) -> None:
        """Warn when steps compiled more programs than planned, at 1, 2, 4, ... programs too many."""
        self.pause()
        self.resume()
        if self._starting and not self._runtime.is_spmd:
            self._allowed, self._starting = self._compiled, self._starting - 1
        excess = self._compiled - self._allowed
        if excess > 0 and excess >= 2 * self._warned_at:
            self._warned_at = excess
            shapes = "; ".join(f"{shape} ({count} times)" for shape, count in self._seen.most_common(8))
            planned = "not planned" if self._planned_shapes is None else f"planned: {self._planned_shapes}"
            logger.warning(
                f"The training step was compiled {self._compiled} times, {excess} more than planned; each compile can "
                f"take minutes on a TPU. Batch shapes so far ({planned}): {shapes}. Give batches fewer shapes "
                "(pad_to_multiple_of, or a collator that pads to fixed lengths), and read no device value in a step."
            )


def _shapes_of(batch: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {list(value.shape)}" for key, value in batch.items() if isinstance(value, torch.Tensor))


_STOPS = ("should_training_stop", "should_epoch_stop")
_DECISIONS = ("should_log", "should_save", "should_evaluate", *_STOPS)
_SECONDS_BETWEEN = 5.0
"""Between exchanges where nothing is due: so long may a host that is told to stop wait for the others."""


def over_processes(accelerator: Accelerator, value: Value) -> list[Value]:
    """Return what each of accelerate's processes gives, in their order. (On XLA there is one, for all devices.)"""
    return [value] if accelerator.num_processes == 1 else gather_object([value])


class HostAgreement:
    """Lets all processes of a run act alike: one a host on a mesh, or accelerate's.

    They exchange requests where arguments and counters call for a log, an evaluation or a save, at the end of an
    epoch, and otherwise every few seconds: in as many steps as those took on the slowest host.
    """

    def __init__(self, runtime: Runtime, accelerator: Accelerator) -> None:
        self._runtime, self._accelerator = runtime, accelerator
        self._by_accelerate = accelerator.num_processes > 1
        topology = runtime.topology()
        self.index = accelerator.process_index if self._by_accelerate else topology.process_index
        self.count = accelerator.num_processes if self._by_accelerate else topology.process_count
        self.is_first_of_host = not self._by_accelerate or accelerator.is_local_main_process
        self._postponed: set[str] = set()  # requests of this process's callbacks, between exchanges
        self._steps, self._batches = _Cadence(), _Cadence()
        self._asked_at = -1  # the step that was decided about last

    def start(self, step: int) -> None:
        """Begin to train at ``step``; the first step is agreed about."""
        self._steps.start(step)
        self._postponed.clear()

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return what every process gave, in their order. For small values; all processes take part."""
        if self._by_accelerate:
            return over_processes(self._accelerator, value)
        return self._runtime.all_gather_object(value)

    def decide(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        requests: Mapping[str, bool],
        now: bool = False,
    ) -> dict[str, bool]:
        """Set in ``control`` what any process has set in its own, and return ``requests`` that any process has.

        Between exchanges one process by itself can only request to stop, and that waits for the next.

        Args:
            now: Whether all processes know that they exchange requests, which they otherwise do where it is due.
        """
        if self.count == 1:
            return dict(requests)
        set_here = {name: getattr(control, name) or name in self._postponed for name in _DECISIONS}
        is_due, self._asked_at = now or self._is_due(args, state), state.global_step
        if not is_due:
            self.postpone(control, _DECISIONS)
            return dict.fromkeys(requests, False)
        own = set_here | dict(requests)
        votes = self._exchange(self._steps, state.global_step, tuple(own.values()))
        decided = {name: any(vote[index] for vote in votes) for index, name in enumerate(own)}
        for name in _DECISIONS:
            setattr(control, name, decided[name])
        self._postponed.clear()
        return {name: decided[name] for name in requests}

    def any_in_evaluation(self, batch: int, request: bool) -> bool:
        """Return whether any process has the request after the evaluation's ``batch``, the first being 1."""
        if self.count == 1:
            return request
        if batch == 1:
            self._batches.start(0)
        return self._batches.is_due(batch) and any(self._exchange(self._batches, batch, request))

    def _exchange(self, cadence: "_Cadence", turn: int, vote: Value) -> list[Value]:
        votes, paces = zip(*self.all_gather_object((vote, cadence.seconds_a_turn(turn))), strict=True)
        cadence.exchanged(turn, max(paces))
        return list(votes)

    def postpone(self, control: TrainerControl, names: Sequence[str] = _STOPS) -> None:
        """Keep what this process's callbacks request until the next exchange."""
        if self.count == 1:
            return
        for name in names:
            if getattr(control, name):
                self._postponed.add(name)
            setattr(control, name, False)

    def _is_due(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Return whether requests are exchanged now: by arguments and counters alone, which all processes share."""
        if self._steps.is_due(state.global_step) or self._asked_at == state.global_step:  # at the end of its epoch
            return True
        scheduled = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
        return any(getattr(scheduled, name) for name in _DECISIONS)


class _Cadence:
    """When the next exchange is: in as many turns as take a few seconds on the slowest host, which all know."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, turn: int) -> None:
        self._last, self._moment, self._next = turn, time.monotonic(), turn + 1

    def is_due(self, turn: int) -> bool:
        return turn >= self._next

    def seconds_a_turn(self, turn: int) -> float:
        return (time.monotonic() - self._moment) / max(turn - self._last, 1)

    def exchanged(self, turn: int, slowest: float) -> None:
        self.start(turn)
        self._next = turn + max(1, int(_SECONDS_BETWEEN / max(slowest, 1e-3)))


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


@cache
def end_forks_by_sigterm() -> None:
    """Let processes forked from here on end by SIGTERM, though this package handles it in this process.

    A pool ends its workers so. One that is about to wait for a task when the signal comes would not run a handler of
    Python's, and the pool would wait for it for ever.
    """

    def leave_sigterm_to_the_system() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if str(getattr(handler, "__module__", "")).startswith("trl_tpu."):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=leave_sigterm_to_the_system)


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

        end_forks_by_sigterm()
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
