"""The same decisions in every process of a run.

Steps, logs, evaluations and saves come from arguments and counters, which all processes share. What need not be the
same is made so: the arguments themselves, and whatever a callback, a signal or a clock asks of one process. A process
that saved, evaluated or stopped alone would leave the others waiting for it in their next collective.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import get_last_checkpoint

from ..errors import UserError
from ..parallel.mesh import MeshShape
from ..runtime import Runtime

Value = TypeVar("Value")

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
        self._asked: dict[str, bool] = {}  # by a callback of this process, between agreements
        self._steps, self._batches = _Meetings(), _Meetings()

    def start(self, step: int) -> None:
        """Begin to train at ``step``; the first step is agreed about."""
        self._steps.start(step)
        self._asked.clear()

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return what every process gave, in their order. For small values; all processes take part."""
        return gather_object([value]) if self._by_accelerate else self._runtime.all_gather_object(value)

    def decide(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, wishes: Mapping[str, bool]
    ) -> dict[str, bool]:
        """Set what ``control`` asks for to what any process asks for, and return ``wishes`` so agreed upon.

        Between agreements nothing but stopping is asked for, by any process alone, and that waits for the next.
        """
        if self.count == 1:
            return dict(wishes)
        asked = {name: bool(getattr(control, name)) or self._asked.get(name, False) for name in _DECISIONS}
        if not self._is_due(args, state):
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
            self._asked[name] = self._asked.get(name, False) or bool(getattr(control, name))
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


def rows_of_host(positions: Sequence[int], count: int, mesh: MeshShape) -> np.ndarray:
    """Return the rows of a batch of ``count`` rows that a host's devices hold, ascending.

    Rows go over the batch axes, inside of which is `tensor`: devices that differ in it alone hold the same rows, also
    when they are on several hosts. A batch that the axes do not divide is whole on every device.

    Args:
        positions: Where in the mesh, last axis fastest, the host's devices are. They need not follow one another:
            chips are numbered through their grid, of which a host has a block.
    """
    if count % mesh.batch_shards:
        return np.arange(count)
    each = count // mesh.batch_shards
    parts = sorted({position // mesh.tensor for position in positions})
    return np.concatenate([np.arange(part * each, (part + 1) * each) for part in parts])


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse hosts that were started with different arguments, data or checkpoints.

    Args:
        runs: What has to be the same everywhere, as each host has it.

    Raises:
        UserError: Names everything that differs, and each host's value.
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


def order_of_pairs(args: Any, processes: int, train_dataset: Any) -> dict[str, Any]:
    """Return what the pairs of each step depend on: a resumed run in which it differs is not the same run."""
    order: dict[str, Any] = {
        name: getattr(args, name) for name in ("seed", "data_seed", "gradient_accumulation_steps")
    }
    order["the batch"] = args.train_batch_size * processes
    return order | {"train data": digest(train_dataset)}


def describe_run(args: Any, eval_dataset: Any, resume: str | bool | None) -> dict[str, Any]:
    """Return what else has to be the same on every host of a mesh: how long, over what mesh, from which checkpoint."""
    folder = get_last_checkpoint(str(args.output_dir)) if resume is True else resume
    state = Path(folder or "", TRAINER_STATE_NAME)
    run: dict[str, Any] = {name: getattr(args, name) for name in ("max_steps", "num_train_epochs")}
    run |= {"mesh": args.mesh, "eval data": digest(eval_dataset)}
    run["the step to resume from"] = json.loads(state.read_text())["global_step"] if state.is_file() else None
    run["the checkpoints"] = sorted(path.name for path in Path(str(args.output_dir)).glob("checkpoint-*"))
    return run


def digest(dataset: Any) -> Any:
    """Return how many rows there are, and a checksum of some; None for a stream; of a dict, this of each dataset."""
    if isinstance(dataset, dict):
        return {name: digest(part) for name, part in dataset.items()}
    if not isinstance(dataset, Dataset) or not len(dataset):
        return None
    some = dataset[range(0, len(dataset), -(-len(dataset) // 16))]
    return f"{len(dataset)} pairs ({crc32(json.dumps(some, sort_keys=True, default=str).encode()):08x})"


def _named(hosts: list[int]) -> str:
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts[:8]))}{more}"


__all__ = ["HostAgreement", "check_alike", "describe_run", "digest", "order_of_pairs", "rows_of_host"]
