"""Scripts as TRL shipped them since 0.7 train with their import changed, with TRL 1.16's losses.

TRL 1.16 runs none of them but `token_pairs`, which trains on the tokens that the others make. Tolerance 1e-5: float32
sums in another order over three steps.
"""

from pathlib import Path

import pytest
import run_old_scripts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    run_old_scripts.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """What TRL itself logs on each data."""
    today = [str(run_old_scripts.FOLDER / "token_pairs.py"), run_old_scripts.MODEL]
    return {
        data: run_old_scripts.run(
            folder, tmp_path_factory.mktemp(data), *today, f"{run_old_scripts.TOKENS}-{data}", "out"
        )
        for data in ("texts", "chats")
    }


@pytest.mark.parametrize("script", run_old_scripts.SCRIPTS)
def test_an_old_script_trains(script: str, folder: Path, expected: dict[str, list[float]], tmp_path: Path) -> None:
    words, data = run_old_scripts.SCRIPTS[script]
    changed = str(run_old_scripts.with_our_import(script, tmp_path))
    losses = run_old_scripts.run(folder, tmp_path, changed, *words)
    assert len(losses) == 3
    assert losses == pytest.approx(expected[data], abs=1e-5)
