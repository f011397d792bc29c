"""Warn when training keeps compiling: on XLA that is the difference between milliseconds and minutes a step."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..runtime import Runtime

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
        if not self._runtime.plans_shapes:
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
        self._compiled += self._runtime.compile_count() - self._mark

    def resume(self) -> None:
        """Count again."""
        self._mark = self._runtime.compile_count()

    def check(self) -> None:
        """Warn when steps compiled more programs than planned, at 1, 2, 4, ... programs too many."""
        self.pause()
        self.resume()
        if self._starting and not self._runtime.records_steps:
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
