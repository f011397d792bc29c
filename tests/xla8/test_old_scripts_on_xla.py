"""An old script trains on eight XLA devices, from its plain arguments on, with TRL 1.16's losses (tolerance 1e-5)."""

from pathlib import Path

import pytest
import run_old_scripts as old


def test_an_old_script_trains_on_eight_devices(tmp_path: Path) -> None:
    old.prepare(tmp_path)
    (*words, _), data = old.SCRIPTS["training_arguments"]
    losses = old.losses(tmp_path, tmp_path / "ours", "training_arguments", [*words, "1"])
    assert len(losses) == 3
    assert losses == pytest.approx(old.losses_of_trl(tmp_path, data), abs=1e-5)
