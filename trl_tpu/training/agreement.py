"""The same decisions in every process of a run.

Steps, logs, evaluations and saves come from arguments and counters, which all processes share (see `same_run`).
Whatever a callback, a signal or a clock requests in one process is made the same. A process that saved, evaluated or
stopped alone would leave the others waiting for it in their next collective.
"""

import time
from collections.abc import Mapping, Sequence

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from ..runtime import Runtime, Value

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
