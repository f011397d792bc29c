"""Progress bar, JSON logs, announcements of compilations, and warnings about late compilations and busy cores."""

import json
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from ..config.reward_config import LENGTH_METRICS, METRICS, REWARD_METRICS
from ..runtime import Runtime

logger = logging.getLogger(__name__)


class RecompileGuard:
    """Warn once in a run about steps that compile programs after warm-up, and announce each new batch shape.

    Warm-up is the first two steps of each planned batch shape, and the step after those. Compilations outside of steps
    (evaluation, saving) are not counted: pass their number to `exclude`.

    Args:
        runtime: Counts compilations.
        announce: Called with a message such as "compiling shape 2 of 4" before a compilation, and with "" after it.
        planned: Number of planned batch shapes; None if shapes are not planned.
    """

    def __init__(self, runtime: Runtime, announce: Callable[[str], None], planned: int | None = None) -> None:
        self._runtime, self._announce, self._planned = runtime, announce, planned
        self._seen: Counter[str] = Counter()
        self._evaluated: Counter[str] = Counter()
        self._last: list[str] = []  # shapes of the last two batches: a step may be compiled during the next step
        self._warm_up = 0
        self._announced = self._has_warned = False
        self._checked = self._runtime.compile_count() or 0  # programs before the next step to check

    def see(self, batch: Mapping[str, Any], updates: bool = True, evaluates: bool = False) -> None:
        """Note the shapes of the next batch. Call this before a step or an evaluation uses the batch.

        Args:
            batch: The tensors of the batch by name.
            updates: Whether the batch's program may update the weights. A program without an update is compiled
                separately.
            evaluates: Whether the batch belongs to an evaluation.
        """
        if self._runtime.compile_count() is None:
            return
        self.settle()
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in batch.items() if hasattr(value, "shape"))
        shapes += "" if updates else ", without an update"
        seen = self._evaluated if evaluates else self._seen
        seen[shapes] += 1
        if seen[shapes] == 1:
            suffix = " for evaluation" if evaluates else "" if self._planned is None else f" of {self._planned}"
            self._announce(f"compiling shape {len(seen)}{suffix}")
            self._announced = True
        if not evaluates:
            self._last = [*self._last[-1:], shapes]
            if seen[shapes] <= 2 and len(seen) <= (self._planned or 1):
                self._warm_up = 2

    def settle(self) -> None:
        """Note that all recorded programs have been executed, and clear the announcement."""
        if self._announced:
            self._announce("")
        self._announced = False

    def exclude(self, compiled: int) -> None:
        """Exclude programs that were compiled outside of steps."""
        self._checked += compiled

    def check(self, step: int) -> None:
        """Warn once if ``step`` compiled programs after warm-up."""
        count = self._runtime.compile_count() or 0
        compiled, self._checked = count - self._checked, count
        if self._warm_up:
            self._warm_up -= 1
        elif compiled and not self._has_warned:
            self._has_warned = True
            planned = "not planned" if self._planned is None else f"planned: {self._planned}"
            logger.warning(
                f"Step {step} compiled {compiled} programs after warm-up; later ones are not reported. Shapes of the "
                f"last batches ({planned}): {'; '.join(self._last)}. Give batches fewer shapes (pad_to_multiple_of, "
                "or a collator that pads to fixed lengths), and do not read device values in a step."
            )


_TRACKER_ONLY = {
    *("grad_norm", "learning_rate", "num_input_tokens_seen", "tokens_per_second", "seconds_per_step", "mfu"),
    *("model_tflops_per_second", "compiled_programs", "memory_gib", *METRICS, *LENGTH_METRICS),
} - {"loss", "accuracy", "num_tokens"}


class Progress(ProgressCallback):
    """Progress bar of transformers that also shows compilations; logged lines omit metrics meant for trackers.

    If `disable_tqdm` is None, bars are shown in terminals and notebooks only: a file would keep each of their updates.

    Args:
        opening: Returns the first line of a run's log.
    """

    def __init__(self, opening: Callable[[], str]) -> None:
        super().__init__()
        self._opening = opening

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            if line := self._opening():
                print(line, flush=True)
            # count from the resumed step; from 0, the bar would underestimate the remaining time
            self.training_bar = _bar(args, state.max_steps, initial=state.global_step)
        self.current_step = state.global_step

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: Any, eval_dataloader: Any = None, **more: Any
    ) -> None:
        if self.prediction_bar is None and state.is_world_process_zero and has_length(eval_dataloader):
            self.prediction_bar = _bar(args, len(eval_dataloader), leave=self.training_bar is None)
        super().on_prediction_step(args, state, control, eval_dataloader, **more)

    def say(self, message: str) -> None:
        """Show a message in the bar, such as "compiling shape 2 of 4"; "" clears it. Without a bar, print it."""
        if self.training_bar is not None and not self.training_bar.disable:
            self.training_bar.set_description_str(message)
        elif self.training_bar is not None and message:
            print(message, flush=True)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **more: Any) -> None:
        shown = {
            name: value
            for name, value in (logs or {}).items()
            if name.removeprefix("eval_") not in _TRACKER_ONLY and "accuracy/" not in name and "grad_norm/" not in name
        }
        super().on_log(args, state, control, logs=shown, **more)
        sys.stdout.flush()  # a file would get the line much later


def _bar(args: TrainingArguments, total: int, **settings: Any) -> Any:
    return tqdm(total=total, dynamic_ncols=True, disable=args.disable_tqdm, **settings)


class JsonLines(TrainerCallback):
    """Print each log as one line of JSON: an object with the step and all numbers, null for nonfinite numbers."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            text = json.dumps({"step": state.global_step, **(logs or {})}, default=float)
            print(json.dumps(json.loads(text, parse_constant=lambda _: None)), flush=True)  # JSON has no NaN


class SubclassMetrics(defaultdict[str, list[float]]):
    """Metrics that a subclass collects over steps, as lists by name.

    The lookup of a built-in metric returns a new list with the value of the last step; the metric is not stored here.

    Args:
        read_last: Returns the built-in metrics of the last step alone. The call waits for the device.
    """

    def __init__(self, read_last: Callable[[], Mapping[str, float]]) -> None:
        super().__init__(list)
        self._read_last = read_last

    def __missing__(self, name: str) -> list[float]:
        last = self._read_last() if name in ("num_tokens", *REWARD_METRICS) else {}
        return [last[name]] if name in last else super().__missing__(name)


def seconds_without_core() -> float:
    """Return how long this thread was ready to run, but had no CPU core. 0 if the system does not count it."""
    counters = Path("/proc/thread-self/schedstat")
    return int(counters.read_text(encoding="ascii").split()[1]) / 1e9 if counters.is_file() else 0.0


_MEASURED_SECONDS, _BUSY_SHARE = 5, 0.2


class BusyCores(TrainerCallback):
    """Warn once if other work uses the CPU cores: the threads of each operation then wait for each other.

    The first log after `_MEASURED_SECONDS` of training decides.
    """

    _start: tuple[float, float] | None = None  # an evaluation may log before training

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._start = (time.monotonic(), seconds_without_core())

    def on_log(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._start is None or (seconds := time.monotonic() - self._start[0]) < _MEASURED_SECONDS:
            return
        share, self._start = (seconds_without_core() - self._start[1]) / seconds, None
        if share > _BUSY_SHARE and state.is_local_process_zero:
            logger.warning(
                f"Training has waited for a CPU core {share:.0%} of the time, since other work uses the cores. Its "
                f"{torch.get_num_threads()} threads then wait for each other. OMP_NUM_THREADS=1 may be much faster."
            )
