"""Old scripts with plain arguments train on eight XLA devices with TRL 1.16's losses (tolerance 1e-5)."""

from pathlib import Path

import pytest
import run_old_scripts as old


def test_old_scripts_train_on_eight_devices(tmp_path: Path) -> None:
    old.prepare(tmp_path)
    *words, _ = old.SCRIPTS["training_arguments"][0]
    scripts = {"training_arguments": [*words, "1"], "easydel": old.SCRIPTS["easydel"][0]}
    losses = {name: old.losses(tmp_path, tmp_path / name, name, words) for name, words in scripts.items()}
    assert losses == {
        name: pytest.approx(each, abs=1e-5) for name, each in old.losses_of_trl(tmp_path, *losses).items()
    }
    assert [len(each) for each in losses.values()] == [3, 1]
