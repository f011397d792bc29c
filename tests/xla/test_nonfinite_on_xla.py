"""A nonfinite step runs the same program as others and changes nothing."""

from pathlib import Path
from typing import Any

import nonfinite_runs as runs
import pytest
from counters import CountAtSteps, Counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("packing", "accumulation", "moments"),
    [pytest.param(True, 2, None, marks=pytest.mark.eight), (False, 1, "bfloat16")],
)
def test_skipped_steps_leave_weights_and_moments_unchanged(
    folder: str, tmp_path: Path, packing: bool, accumulation: int, moments: str | None
) -> None:
    """Steps 2, 6 and 7 of 10 have a NaN. They run the same program, without reads from the device."""
    settings: dict[str, Any] = {"packing": packing, "gradient_accumulation_steps": accumulation}
    settings["optim_state_dtype"] = moments
    counter = CountAtSteps()
    skipped = runs.train(folder, tmp_path, [1, 5, 6], 10, callbacks=[counter], **settings)
    without = runs.train(folder, tmp_path, [], 10, left_out=[1, 5, 6], **settings)
    executions_a_step = 1 if accumulation == 1 else accumulation + 1
    assert counter.between(1, 9) == Counts(0, 8 * executions_a_step, 0)
    runs.check_skipped(skipped, without, 3)


def test_optimizer_that_creates_state_in_its_first_step_is_supported(folder: str, tmp_path: Path) -> None:
    """The first two steps are read and skipped. Later steps need no read."""
    counter = CountAtSteps()
    skipped = runs.train(folder, tmp_path, [0, 1, 5], 9, callbacks=[counter], optim="sgd")
    without = runs.train(folder, tmp_path, [], 9, left_out=[0, 1, 5], optim="sgd")
    runs.check_skipped(skipped, without, 3)
    assert counter.between(4, 8) == Counts(0, 4, 0)
