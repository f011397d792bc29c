"""The scripts of `tests/train/test_old_scripts.py` train on PyTorch/XLA, with TRL 1.16's losses (tolerance 1e-5)."""

from pathlib import Path

import pytest
import run_old_scripts


@pytest.mark.parametrize(
    "script",
    [name if name == "raw_rows" else pytest.param(name, marks=pytest.mark.long) for name in run_old_scripts.SCRIPTS],
)
def test_an_old_script_trains_on_xla(script: str, tmp_path: Path) -> None:
    run_old_scripts.prepare(tmp_path)
    words, data = run_old_scripts.SCRIPTS[script]
    today = [str(run_old_scripts.FOLDER / "token_pairs.py"), run_old_scripts.MODEL]
    expected = run_old_scripts.run(
        tmp_path, tmp_path / "trl", *today, f"{run_old_scripts.TOKENS}-{data}", "out", USE_TORCH_XLA="0"
    )
    (tmp_path / "ours").mkdir()
    changed = str(run_old_scripts.with_our_import(script, tmp_path / "ours"))
    losses = run_old_scripts.run(tmp_path, tmp_path / "ours", changed, *words)
    assert len(losses) == 3
    assert losses == pytest.approx(expected, abs=1e-5)
