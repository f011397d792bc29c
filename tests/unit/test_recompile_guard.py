"""The recompile guard warns at the right step. tests/xla/test_progress_on_xla.py checks its message."""

from typing import Any

import pytest
import torch

from trl_tpu.runtime.native import Runtime
from trl_tpu.training.progress import RecompileGuard

BATCH = {"input_ids": torch.zeros(4, 2, 64), "attention_mask": torch.zeros(4, 2, 64), "name": "no tensor"}
OTHER = {"input_ids": torch.zeros(4, 2, 77)}


class Counting(Runtime):
    """Plain torch with a number of compiled programs that the test sets."""

    compiled = 100  # programs compiled before training do not count
    plans_shapes = True

    def compile_count(self) -> int:
        return self.compiled


def warned(guard: RecompileGuard, steps: list[tuple[dict, int]], caplog: pytest.LogCaptureFixture) -> list[int]:
    """Take steps that each compile a number of programs; return the 1-based steps at which the guard warned."""
    found, runtime = [], guard._runtime
    assert isinstance(runtime, Counting)
    for step, (batch, compiles) in enumerate(steps, start=1):
        caplog.clear()
        guard.see(batch)
        runtime.compiled += compiles
        guard.check(step)
        found += [step] * len(caplog.records)
    return found


ROUND = [(BATCH, 300), (BATCH, 20), (BATCH, 1), (OTHER, 9), (BATCH, 2), (OTHER, 1), (BATCH, 1)]


WARM_UPS = [
    (2, ROUND, []),  # no warning at the first two steps of each shape and the step after them
    (2, [*ROUND, (BATCH, 0), (OTHER, 1), (BATCH, 1)], [9]),  # one warning
    (2, [*ROUND, (OTHER, 0), ({"input_ids": torch.zeros(4, 2, 80)}, 1)], [9]),
    (None, [(BATCH, 1), (OTHER, 1), (OTHER, 1)], [3]),
    (None, [(BATCH, 1)] * 4, [4]),
]


@pytest.mark.parametrize(("planned", "steps", "at"), WARM_UPS)
def test_guard_warns_once_after_warm_up(planned: int | None, steps: Any, at: list[int], caplog: Any) -> None:
    guard = RecompileGuard(Counting())
    for _ in range(2):  # a second run counts from zero
        guard.start(planned)
        assert warned(guard, steps, caplog) == at


def test_guard_ignores_programs_compiled_outside_training(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Counting()
    guard = RecompileGuard(runtime)
    guard.start(1)
    assert warned(guard, [(BATCH, 1)] * 3, caplog) == []
    for step in range(10):
        guard.pause()
        runtime.compiled += 50  # for example by an evaluation
        guard.resume()
        guard.check(step)
    assert caplog.records == []
    assert warned(guard, [(BATCH, 1)], caplog) == [1]
