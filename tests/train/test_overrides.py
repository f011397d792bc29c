"""What a subclass overrides is called where TRL calls it, but for what a guide lists with the reason."""

from pathlib import Path

import hub_server
import overridden
import pytest

import trl_tpu


def test_overrides_are_called_in_every_part_of_a_run(tmp_path: Path) -> None:
    with hub_server.serve("x") as hub:
        online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        online |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        theirs, ours = (overridden.run_apart(name, tmp_path / name, **online) for name in ("trl", "trl_tpu"))
    assert {repo for repo, _ in hub.commits} == {"user/overridden"}
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    assert overridden.not_called(theirs, ours) == overridden.listed()
    for name in theirs["reading"]:  # batches, which are padded then
        own = type("Own", (trl_tpu.RewardTrainer,), {name: lambda *_: None})
        assert own.__new__(own).reads_padded_rows() == name
