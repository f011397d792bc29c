"""What a subclass overrides is called on XLA where TRL calls it, with TRL's losses (tolerance 1e-5)."""

from pathlib import Path

import overridden
import pytest

import trl_tpu


def test_overrides_are_called_in_every_part_of_a_run(tmp_path: Path) -> None:
    theirs = overridden.run_apart("trl", tmp_path / "theirs")
    ours = overridden.run(trl_tpu, tmp_path / "ours")
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert overridden.not_called(theirs, ours) <= overridden.listed()
