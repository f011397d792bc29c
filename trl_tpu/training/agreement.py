"""The same decisions in every process of a run.

Steps, logs, evaluations and saves come from arguments and counters, which all processes share (see `same_run`).
Whatever a callback, a signal or a clock asks of one process is made the same. A process that saved, evaluated or
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
"""Between agreements where nothing is due: so long may a host that is told to stop wait for the others."""


class HostAgreement:
    """Lets all processes of a run act alike: one a host on a mesh, or accelerate's.

    They meet where arguments and counters call for a log, an evaluation or a save, at the end of an epoch, and
    otherwise every few seconds: in as many steps as those took on the slowest host.
    """

    def __init__(self, runtime: Runtime, accelerator: Accelerator) -> None:
        self._runtime = runtime
        self._by_accelerate = accelerator.num_processes > 1
        topology = runtime.topology()
        self.index = accelerator.process_index if self._by_accelerate else topology.process_index
        self.count = accelerator.num_processes if self._by_accelerate else topology.process_count
        self._asked: set[str] = set()  # by callbacks of this process, between agreements
        self._steps, self._batches = _Meetings(), _Meetings()

    def start(self, step: int) -> None:
        """Begin to train at ``step``; the first step is agreed about."""
        self._steps.start(step)
        self._asked.clear()

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return what every process gave, in their order. For small values; all processes take part."""
        return gather_object([value]) if self._by_accelerate else self._runtime.all_gather_object(value)

    def decide(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        wishes: Mapping[str, bool],
        now: bool = False,
    ) -> dict[str, bool]:
        """Set what ``control`` asks for to what any process asks for, and return ``wishes`` so agreed upon.

        Between agreements nothing but stopping is asked for, by any process alone, and that waits for the next.

        Args:
            now: Whether all processes know that they meet, which they otherwise do where it is due.
        """
        if self.count == 1:
            return dict(wishes)
        asked = {name: getattr(control, name) or name in self._asked for name in _DECISIONS}
        if not now and not self._is_due(args, state):
            self.postpone(control, _DECISIONS)
            return dict.fromkeys(wishes, False)
        own = asked | dict(wishes)
        votes = self._meet(self._steps, state.global_step, tuple(own.values()))
        decided = {name: any(vote[index] for vote in votes) for index, name in enumerate(own)}
        for name in _DECISIONS:
            setattr(control, name, decided[name])
        self._asked.clear()
        return {name: decided[name] for name in wishes}

    def any_in_evaluation(self, batch: int, wish: bool) -> bool:
        """Return whether any process wishes so after the evaluation's ``batch``, the first being 1."""
        if self.count == 1:
            return wish
        if batch == 1:
            self._batches.start(0)
        return self._batches.is_due(batch) and any(self._meet(self._batches, batch, wish))

    def _meet(self, meetings: "_Meetings", turn: int, vote: Value) -> list[Value]:
        votes, paces = zip(*self.all_gather_object((vote, meetings.seconds_a_turn(turn))), strict=True)
        meetings.met(turn, max(paces))
        return list(votes)

    def postpone(self, control: TrainerControl, names: Sequence[str] = _STOPS) -> None:
        """Keep what a callback of this process asks for until all are asked."""
        if self.count == 1:
            return
        for name in names:
            if getattr(control, name):
                self._asked.add(name)
            setattr(control, name, False)

    def _is_due(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Return whether all processes are asked now: by arguments and counters alone, which they share."""
        if self._steps.is_due(state.global_step) or float(state.epoch or 0).is_integer():
            return True
        scheduled = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
        return any(getattr(scheduled, name) for name in _DECISIONS)


class _Meetings:
    """When to meet next: in as many turns as take a few seconds on the slowest host, which all processes know."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, turn: int) -> None:
        self._last, self._moment, self._next = turn, time.monotonic(), turn + 1

    def is_due(self, turn: int) -> bool:
        return turn >= self._next

    def seconds_a_turn(self, turn: int) -> float:
        return (time.monotonic() - self._moment) / max(turn - self._last, 1)

    def met(self, turn: int, slowest: float) -> None:
        self.start(turn)
        self._next = turn + max(1, int(_SECONDS_BETWEEN / max(slowest, 1e-3)))
