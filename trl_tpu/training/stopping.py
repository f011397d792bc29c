"""How a run stops or saves before its time: SIGTERM, a time limit, votes, and what hosts must have alike."""

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from ..data.length_stats import is_prepared, length_stats
from ..errors import NOT_SAVED, UNFINISHED, UserError
from ..runtime import Runtime, Value

logger = logging.getLogger(__name__)

_STOPS = ("should_training_stop", "should_epoch_stop")
_DECISIONS = ("should_log", "should_save", "should_evaluate", *_STOPS)
_SECONDS_BETWEEN = 5.0
"""Between votes where nothing is due: the maximum time that a preempted host waits for the others."""


def over_processes(accelerator: Accelerator | None, value: Value) -> list[Value]:
    """Return the value of each of accelerate's processes, in their order. (On XLA there is one, for all devices.)"""
    return [value] if accelerator is None or accelerator.num_processes == 1 else gather_object([value])


class HostAgreement:
    """Votes between all processes of a run, so that they act alike: one process a host on a mesh, or accelerate's.

    They vote where arguments and counters call for a log, an evaluation or a save, at the end of an epoch, and
    otherwise every few seconds, measured in steps of the slowest host.
    """

    def __init__(self, runtime: Runtime, accelerator: Accelerator) -> None:
        self._runtime, self._accelerator = runtime, accelerator
        self._by_accelerate = accelerator.num_processes > 1
        topology = runtime.topology()
        self.index = accelerator.process_index if self._by_accelerate else topology.process_index
        self.count = accelerator.num_processes if self._by_accelerate else topology.process_count
        self.is_first_of_host = not self._by_accelerate or accelerator.is_local_main_process
        self._postponed: set[str] = set()  # requests of this process's callbacks, between votes
        self._steps, self._batches = _Votes(self.all_gather_object), _Votes(self.all_gather_object)
        self._asked_at = -1  # the last step that was decided about

    def start(self, step: int) -> None:
        """Begin to train at ``step``; the first step is voted about."""
        self._steps.start(step)
        self._postponed.clear()

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return the value of every process, in their order. For small values; all processes take part."""
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

        Between votes one process by itself can only request to stop, and that waits for the next.

        Args:
            now: Vote also where nothing is due; all processes must know.
        """
        if self.count == 1:
            return dict(requests)
        is_due = now or self._is_due(args, state)
        self._asked_at = state.global_step
        if not is_due:
            self.postpone(control, _DECISIONS)
            return dict.fromkeys(requests, False)
        own = {name: getattr(control, name) or name in self._postponed for name in _DECISIONS} | {**requests}
        votes = self._steps.exchange(state.global_step, own)
        decided = {name: any(vote[name] for vote in votes) for name in own}
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
        return batch >= self._batches.next and any(self._batches.exchange(batch, request))

    def postpone(self, control: TrainerControl, names: Sequence[str] = _STOPS) -> None:
        """Keep the requests of this process's callbacks until the next vote."""
        if self.count > 1:
            self._postponed.update(name for name in names if getattr(control, name))
            for name in names:
                setattr(control, name, False)

    def _is_due(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Return whether to vote now: by arguments and counters alone, which all processes share."""
        if state.global_step >= self._steps.next or self._asked_at == state.global_step:  # at the end of its epoch
            return True
        scheduled = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
        return any(getattr(scheduled, name) for name in _DECISIONS)


class _Votes:
    """Exchanges of votes: the next one is due after as many turns as take a few seconds on the slowest host."""

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self.start(0)

    def start(self, turn: int) -> None:
        self._last, self._moment, self.next = turn, time.monotonic(), turn + 1

    def exchange(self, turn: int, vote: Value) -> list[Value]:
        pace = (time.monotonic() - self._moment) / max(turn - self._last, 1)
        votes, paces = zip(*self._gather((vote, pace)), strict=True)
        self.start(turn)
        self.next = turn + max(1, int(_SECONDS_BETWEEN / max(*paces, 1e-3)))
        return list(votes)


SIGTERM = "SIGTERM"
TIME_LIMIT = "training_time_limit"
SAVE_INTERVAL = "save_interval_minutes"


class Unfinished(SystemExit):
    """Training was stopped before its end and has saved a checkpoint to resume from; uncaught, the exit status is 75.

    If that checkpoint could not be saved, the status is 74, and an earlier one has to be resumed.

    `train()` raises it after a SIGTERM: what a script does after training is for a trained model, and takes time that
    a preempted process does not have.

    Attributes:
        reason: What stopped training: "SIGTERM" or "training_time_limit".
        checkpoint: The folder, or URL, to resume from.
        saved: Whether it could be saved.
    """

    def __init__(self, reason: str, checkpoint: str, saved: bool = True) -> None:
        super().__init__(UNFINISHED if saved else NOT_SAVED)
        self.reason, self.checkpoint, self.saved = reason, checkpoint, saved

    def __str__(self) -> str:
        outcome = "is to go on from" if self.saved else "could not be saved"
        return f"{self.reason} stopped training; {self.checkpoint} {outcome}"


class EvaluationCutShort(Exception):
    """An evaluation is not waited for, since the process is preempted."""


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


class Preemption(ExportableState):
    """Saves and stops a run before its time: at a SIGTERM, a time limit, an interval between saves.

    A request of one process at the end of a step is decided on by all of them together.

    Args:
        time_limit: Longest duration of one `train()`; None for no limit.
        save_interval: Time between saves; None for never.
    """

    def __init__(self, time_limit: timedelta | None, save_interval: timedelta | None) -> None:
        self._time_limit = timedelta.max if time_limit is None else time_limit
        self._save_interval = timedelta.max if save_interval is None else save_interval
        self.start()

    def start(self) -> None:
        """Begin to train."""
        self.stopped_by: str | None = None
        """What ended training before its end: `SIGTERM` or `TIME_LIMIT`."""
        self.told_to_stop = False
        """Whether a SIGTERM has come to this process."""
        self.requests = dict.fromkeys((SIGTERM, TIME_LIMIT, SAVE_INTERVAL), False)
        """Requests of this process at the end of the last step."""
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
        """Note the end of ``step``, and this process's requests."""
        trained, unsaved = (timedelta(seconds=time.monotonic() - at) for at in (self._started, self._last_save))
        self.requests = {
            SIGTERM: self.told_to_stop,
            TIME_LIMIT: trained >= self._time_limit and step < max_steps,
            SAVE_INTERVAL: unsaved >= self._save_interval,
        }

    def decide(
        self, agreement: HostAgreement, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> bool:
        """Let all processes log, evaluate, save and stop alike; return whether this step must be saved."""
        requests = agreement.decide(args, state, control, self.requests)
        if self.stopped_by is not None:  # the end of an epoch, cut short or not, asks once more
            control.should_log = control.should_evaluate = control.should_save = False
            return True
        reason = next((name for name in (SIGTERM, TIME_LIMIT) if requests[name]), None)
        if reason is not None:
            self.stop(reason, args, state, control)
        control.should_save |= requests[SAVE_INTERVAL] and not self.has_saved(state.global_step)
        return reason is not None or requests[SAVE_INTERVAL]

    def stop(self, reason: str, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Decide to save and to stop. After the last step of an epoch, do now what the epoch's end asks for."""
        self.stopped_by = reason
        if float(state.epoch or 0).is_integer():
            DefaultFlowCallback().on_epoch_end(args, state, control)
        if reason == SIGTERM and control.should_evaluate:
            control.should_evaluate = False
            logger.warning("The evaluation due at step %s is left out, to save and stop in time.", state.global_step)
        control.should_save = control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Return the entry of a stopped run in a checkpoint's `trainer_state.json`, in the form of a callback's state.

        transformers ignores the states of callbacks that a resumed run does not have.
        """
        return {"args": {}, "attributes": {"stopped_by": self.stopped_by}}

    def note_save(self, step: int) -> None:
        """Note that a checkpoint of ``step`` was begun."""
        self._saved_step, self._last_save = step, time.monotonic()

    def has_saved(self, step: int) -> bool:
        """Return whether a checkpoint of ``step`` was begun."""
        return self._saved_step == step


class StepCallback(TrainerCallback):
    """Tells components when training begins and when its steps end.

    Args:
        begin: Called when the model and its state are ready to train.
        check: Called with the number of each step that has ended.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        agreement: HostAgreement,
        preemption: Preemption,
        check: Callable[[int], None],
    ) -> None:
        self._begin, self._agreement, self._preemption, self._check = begin, agreement, preemption, check

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begin()
        # a resumed run compares this with its own argument, and would warn of a change on every mesh
        state.train_batch_size = args.per_device_train_batch_size

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._agreement.postpone(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._check(state.global_step)
        self._preemption.note_step(state.global_step, state.max_steps)


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if hosts were started with different arguments, data or checkpoints.

    Args:
        runs: Of each host, by name, what has to be the same on all.
    """
    faults = []
    for name in runs[0]:
        hosts_of: dict[str, list[int]] = {}
        for host, run in enumerate(runs):
            hosts_of.setdefault(json.dumps(run[name], default=str), []).append(host)
        if len(hosts_of) > 1:
            faults.append(f"{name} is " + " and ".join(f"{value} on {_named(on)}" for value, on in hosts_of.items()))
    if faults:
        raise UserError(
            f"All hosts must train the same run, but {'; '.join(faults)}. Start the same command on every host, with "
            "the same data, and an output_dir that all of them share."
        )


def describe_run(args: Any, eval_dataset: Any, resume: str | bool | None) -> dict[str, Any]:
    """Return the mesh, evaluation data and checkpoints, which have to be the same on every host of a mesh too."""
    return {
        "mesh": str(args.mesh_shape),
        "eval data": digest(eval_dataset),
        "the checkpoint to resume from": Path(resume).name if isinstance(resume, str) else bool(resume),
        "the checkpoints": sorted(path.name for path in Path(str(args.output_dir)).glob("checkpoint-*")),
    }


def digest(dataset: Any) -> Any:
    """Return the number of pairs and their checksum; None for a stream; for a dict, that of each dataset."""
    if isinstance(dataset, dict):
        return {name: digest(part) for name, part in dataset.items()}
    if not is_prepared(dataset):
        return None
    return f"{len(dataset)} pairs ({length_stats(dataset).checksum:08x})"


def _named(hosts: list[int]) -> str:
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts[:8]))}{more}"
