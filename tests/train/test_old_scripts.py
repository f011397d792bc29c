"""Scripts for TRL since 0.5 with a changed import, and a translated EasyDeL script, train with TRL 1.16's losses.

The tolerance is 1e-5: float32 sums have another order over three steps.
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
    """Return the losses that TRL logs on the data of each script."""
    return old.losses_of_trl(folder, *old.SCRIPTS)


@pytest.mark.parametrize("script", old.SCRIPTS)
def test_old_script_trains_with_trls_losses(
    script: str, folder: Path, expected: dict[str, list[float]], tmp_path: Path
) -> None:
    losses = old.losses(folder, tmp_path, script, old.SCRIPTS[script][0])
    assert len(losses) == (1 if script == "easydel" else 3)
    assert losses == pytest.approx(expected[script], abs=1e-5)
