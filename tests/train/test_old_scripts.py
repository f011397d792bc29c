"""Scripts of TRL since 0.5, their import changed, and EasyDeL's translated, train with TRL 1.16's losses.

Tolerance 1e-5: float32 sums in another order over three steps.
"""

from pathlib import Path

import pytest
import run_old_scripts as old


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    old.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[float]]:
    """What TRL itself logs on each data."""
    return old.losses_of_trl(folder, *old.SCRIPTS)


@pytest.mark.parametrize("script", old.SCRIPTS)
def test_an_old_script_trains(script: str, folder: Path, expected: dict[str, list[float]], tmp_path: Path) -> None:
    losses = old.losses(folder, tmp_path, script, old.SCRIPTS[script][0])
    assert len(losses) == (1 if script == "easydel" else 3)
    assert losses == pytest.approx(expected[script], abs=1e-5)
