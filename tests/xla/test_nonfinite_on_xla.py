"""A nonfinite step runs the same program as others, changes nothing, and is detected at a log."""

from pathlib import Path
from typing import Any

import nonfinite_runs as runs
import pytest
from counters import CountAtSteps, Counts
from training import state_of


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


def test_three_nonfinite_steps_in_a_row_stop_and_name_the_pairs(folder: str, tmp_path: Path) -> None:
    """Steps 4 to 6 of 8 are nonfinite; logs are at steps 5 and 8."""
    trainer = runs.make(folder, tmp_path, [1, 3, 4, 5], 10, logging_steps=5)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row, 4 to 6,.*step 4 are rows \[24, 25, 26,"):
        trainer.train()
    assert trainer.state.global_step == 10
    assert runs.logged(trainer, "nonfinite") == [3, 1]
    assert not any(weight.isnan().any() for name, weight in state_of(trainer).items() if "embed" not in name)
