"""Early stops and extra saves of a run (SIGTERM, time limit, save interval), votes of ranks, comparison of hosts."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from ..checkpoint.identity import changes
from ..config.reward_config import RewardConfig
from ..data.length_stats import is_prepared, length_stats
from ..errors import NOT_SAVED, UNFINISHED, UserError
from ..runtime import Runtime, Value

_STOPS = ("should_training_stop", "should_epoch_stop")
_DECISIONS = ("should_log", "should_save", "should_evaluate", *_STOPS)
#: Time between votes that nothing else triggers: the maximum time a preempted host waits for all hosts to stop.
_SECONDS_BETWEEN_VOTES = 5.0


def over_processes(accelerator: Accelerator | None, value: Value) -> list[Value]:
    """Return the values of all of accelerate's processes in rank order. On XLA it counts one process."""
    return [value] if accelerator is None or accelerator.num_processes == 1 else gather_object([value])


class HostAgreement:
    """Votes that make all processes of a run log, evaluate, save and stop at the same steps.

    The processes are one per host on a mesh, or else accelerate's. They vote at steps where arguments and counters
    schedule a log, an evaluation or a save, and at the end of an epoch. Between those they vote every few seconds,
    converted to a number of steps by the speed of the slowest host.

    Attributes:
        all_gather_object: Returns the values of all processes in rank order. Values must be small; all processes take
            part.
    """

    def __init__(self, runtime: Runtime, accelerator: Accelerator) -> None:
        by_accelerate, topology = accelerator.num_processes > 1, runtime.topology()
        self.index = accelerator.process_index if by_accelerate else topology.process_index
        self.count = accelerator.num_processes if by_accelerate else topology.process_count
        self.is_first_of_host = not by_accelerate or accelerator.is_local_main_process
        self.all_gather_object = partial(over_processes, accelerator) if by_accelerate else runtime.all_gather_object
        self._postponed: set[str] = set()  # requests of this process's callbacks, between votes
        self._steps, self._batches = _Votes(self.all_gather_object), _Votes(self.all_gather_object)
        self._last_decided = -1  # the last step passed to `decide`

    def start(self, step: int) -> None:
        """Begin to train at ``step``. The next step has a vote."""
        self._steps.start(step)
        self._postponed.clear()

    def decide(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, requests: Mapping[str, bool]
    ) -> dict[str, bool]:
        """Combine the decisions of all processes: each decision and request that any process has applies to all.

        Between votes, the requests of one process wait for the next vote.

        Args:
            args: The trainer's settings.
            state: The trainer's state.
            control: The trainer's control; the combined decisions are set in it.
            requests: Further requests of this process by name.

        Returns:
            The combined requests.
        """
        if self.count == 1:
            return dict(requests)
        step, scheduled = state.global_step, DefaultFlowCallback().on_step_end(args, state, TrainerControl())
        # all processes share arguments and counters, and all act or end an epoch before a second call in a step
        is_due = step >= self._steps.next or step == self._last_decided
        self._last_decided = step
        if not is_due and not any(getattr(scheduled, name) for name in _DECISIONS):
            self.postpone(control, _DECISIONS)
            return dict.fromkeys(requests, False)
        ballot = {name: getattr(control, name) or name in self._postponed for name in _DECISIONS} | {**requests}
        votes = self._steps.exchange(step, ballot)
        decided = {name: any(vote[name] for vote in votes) for name in ballot}
        for name in _DECISIONS:
            setattr(control, name, decided[name])
        self._postponed.clear()
        return {name: decided[name] for name in requests}

    def any_in_evaluation(self, batch: int, request: bool) -> bool:
        """Return whether any process has the request after an evaluation batch; False between votes.

        Args:
            batch: Number of the batch in the evaluation, from 1.
            request: Whether this process has the request.
        """
        if self.count == 1:
            return request
        if batch == 1:
            self._batches.start(0)
        return batch >= self._batches.next and any(self._batches.exchange(batch, request))

    def postpone(self, control: TrainerControl, names: Sequence[str] = _STOPS) -> None:
        """Postpone the requests of this process's callbacks to the next vote, and clear them in ``control``."""
        if self.count > 1:
            self._postponed.update(name for name in names if getattr(control, name))
            for name in names:
                setattr(control, name, False)


class _Votes:
    """Exchange of votes. The next vote is due after a few seconds, counted in turns of the slowest host.

    A turn is a training step or an evaluation batch.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self.start(0)

    def start(self, turn: int) -> None:
        self._last, self._moment, self.next = turn, time.monotonic(), turn + 1

    def exchange(self, turn: int, vote: Value) -> list[Value]:
        pace = (time.monotonic() - self._moment) / max(turn - self._last, 1)
        votes, paces = zip(*self._gather((vote, pace)), strict=True)
        self.start(turn)
        self.next = turn + max(1, int(_SECONDS_BETWEEN_VOTES / max(*paces, 1e-3)))
        return list(votes)


SIGTERM = "SIGTERM"
TIME_LIMIT = "training_time_limit"
SAVE_INTERVAL = "save_interval_minutes"


class Unfinished(SystemExit):
    """Early stop of training, with a checkpoint to resume from. If uncaught, the process exits with status 75.

    The exit status is 74 if the checkpoint could not be saved: resume from an earlier checkpoint.

    `train()` raises this exception after a SIGTERM. The rest of a training script expects a fully trained model, and a
    preempted process has no time for it.

    Attributes:
        reason: Reason for the stop: "SIGTERM" or "training_time_limit".
        checkpoint: Folder or URL of the checkpoint.
        saved: Whether the checkpoint was saved.
    """

    def __init__(self, reason: str, checkpoint: str, saved: bool = True) -> None:
        super().__init__(UNFINISHED if saved else NOT_SAVED)
        self.reason, self.checkpoint, self.saved = reason, checkpoint, saved

    def __str__(self) -> str:
        outcome = f"resume from {self.checkpoint}" if self.saved else f"{self.checkpoint} could not be saved"
        return f"{self.reason} stopped training; {outcome}"


class EvaluationInterrupted(Exception):
    """Early end of an evaluation because a process is preempted."""


@cache
def end_forks_by_sigterm() -> None:
    """Restore the default SIGTERM action in all processes forked from now on.

    A multiprocessing pool ends its workers with SIGTERM. A worker that is about to wait for a task would not run a
    Python signal handler, and the pool would wait for the worker forever.
    """

    def restore_default_action() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if str(getattr(handler, "__module__", "")).startswith("trl_tpu."):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore_default_action)


class Preemption(ExportableState):
    """Early stops and extra saves of one `train()`: after a SIGTERM, at a time limit, at intervals between saves.

    All processes decide on the requests of each in a vote, at the end of a step. The clocks start when the object is
    made.

    Args:
        args: The trainer's settings. `time_limit` is the maximum duration, None for no limit. `save_interval_minutes`
            is the time between saves, None for no extra saves.

    Attributes:
        stopped_by: Reason for an early stop: `SIGTERM` or `TIME_LIMIT`; None without an early stop.
        is_preempted: Whether this process has received SIGTERM.
        interrupts_evaluations: Whether a SIGTERM ends the current evaluation by `EvaluationInterrupted`; the step is
            saved then.
        saved_step: Step of the last save that was started.
    """

    stopped_by: str | None = None
    is_preempted = interrupts_evaluations = False
    saved_step = -1

    def __init__(self, args: RewardConfig) -> None:
        self._args, minutes = args, args.save_interval_minutes
        self._time_limit = timedelta.max if args.time_limit is None else args.time_limit
        self._save_interval = timedelta.max if minutes is None else timedelta(minutes=minutes)
        self._started = self._last_save = time.monotonic()

    @contextlib.contextmanager
    def handle_sigterm(self, listens: bool) -> Iterator[None]:
        """Return a context that notes the first SIGTERM; a second one runs the previous handler.

        Args:
            listens: Whether to install the handler; False if another component handles SIGTERM. Outside of the main
                thread no handler is installed.
        """
        if not listens or threading.current_thread() is not threading.main_thread():
            yield
            return

        # None means that a handler was not installed from Python, and Python cannot restore it
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def note(*_: object) -> None:
            self.is_preempted = True
            signal.signal(signal.SIGTERM, before)

        end_forks_by_sigterm()
        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def decide(self, agreement: HostAgreement, state: TrainerState, control: TrainerControl) -> bool:
        """Vote on logs, evaluations, saves and stops, and set the decisions in ``control``.

        Returns:
            Whether a checkpoint of this step must be saved.
        """
        trained, unsaved = (timedelta(seconds=time.monotonic() - start) for start in (self._started, self._last_save))
        own_requests = {
            SIGTERM: self.is_preempted,
            TIME_LIMIT: trained >= self._time_limit and state.global_step < state.max_steps,
            SAVE_INTERVAL: unsaved >= self._save_interval,
        }
        requests = agreement.decide(self._args, state, control, own_requests)
        if self.stopped_by is not None:  # second call in the last step, at the end of its epoch
            control.should_log = control.should_evaluate = control.should_save = False
            return True
        reason = next((name for name in (SIGTERM, TIME_LIMIT) if requests[name]), None)
        if reason is not None:
            self.stop(reason, state, control)
        control.should_save |= requests[SAVE_INTERVAL] and self.saved_step != state.global_step
        return reason is not None or requests[SAVE_INTERVAL]

    def stop(self, reason: str, state: TrainerState, control: TrainerControl) -> None:
        """Request a save and a stop. At the end of an epoch, also request the log and evaluation due there."""
        self.stopped_by = reason
        if float(state.epoch or 0).is_integer():
            DefaultFlowCallback().on_epoch_end(self._args, state, control)
        control.should_evaluate &= reason != SIGTERM  # an evaluation would take too long
        control.should_save = control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Return the reason for the stop as an entry of `trainer_state.json`, in the format of a callback's state.

        A resumed run ignores this entry: transformers skips the states of callbacks that the run does not have.
        """
        return {"args": {}, "attributes": {"stopped_by": self.stopped_by}}

    def note_save(self, step: int) -> None:
        """Note that a save of ``step`` was started."""
        self.saved_step, self._last_save = step, time.monotonic()


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Check that all hosts were started with the same arguments, data and checkpoints.

    Args:
        runs: One mapping per host, from names to values that must be equal on all hosts.

    Raises:
        UserError: A value differs between hosts. The message lists the first differences from host 0.
    """
    faults = [
        f"{name} is {before!r} on host 0 and {now!r} on host {host}"
        for host, run in enumerate(runs)
        for name, before, now in changes(runs[0], run)
    ]
    if faults:
        raise UserError(
            f"All hosts must train the same run, but {'; '.join(faults[:8])}. Start the same command on every host, "
            "with the same data and an output_dir that all hosts share."
        )


def digest(dataset: Any) -> Any:
    """Return a dataset's number of rows and checksum as text; None for a stream; a dict for a dict of datasets."""
    if isinstance(dataset, dict):
        return {name: digest(part) for name, part in dataset.items()}
    if not is_prepared(dataset):
        return None
    # "pairs" for every kind of rows: older checkpoints have it
    return f"{len(dataset)} pairs ({length_stats(dataset).checksum:08x})"
