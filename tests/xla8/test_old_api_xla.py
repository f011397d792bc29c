"""An old script runs on eight XLA devices, from its plain `TrainingArguments` on, with the numbers of plain torch.

Each run is a process of its own, so that the script is what starts the devices. Tolerance 1e-4: float32 sums in
another order over three steps.
"""

import json
from pathlib import Path
from typing import Any

import apart
import pytest
import tiny

PLAIN_TORCH = {"USE_TORCH_XLA": "0"}
EIGHT_DEVICES = {"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}


def run_old_script(folder: Path, environment: dict[str, str], pairs_per_device: int) -> dict[str, Any]:
    out = folder / "out.json"
    process = apart.run("old_script.py", str(folder / "model"), str(pairs_per_device), str(out), **environment)
    assert process.returncode == 0, process.stderr[-4000:]
    result = json.loads(out.read_text())
    out.unlink()
    return result


@pytest.mark.long
def test_an_old_script_gets_the_numbers_of_plain_torch(tmp_path: Path) -> None:
    rows = tiny.made_up_pairs(20)
    tiny.save_tiny(tmp_path / "model", [*rows["prompt"], *rows["chosen"], *rows["rejected"]])
    plain = run_old_script(tmp_path, PLAIN_TORCH, pairs_per_device=8)
    sharded = run_old_script(tmp_path, EIGHT_DEVICES, pairs_per_device=1)
    assert (plain["runtime"], sharded["runtime"], sharded["devices"]) == ("native", "xla", 8)

    assert len(plain["losses"]) == 3  # of 8, 8 and 4 pairs
    assert plain["losses"][0] - plain["losses"][2] > 0.05
    assert sharded["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    for key in ("eval_accuracy", "eval_loss", "eval_margin"):
        assert sharded["metrics"][key] == pytest.approx(plain["metrics"][key], abs=1e-4), key
    assert [len(row) for row in sharded["predictions"]] == [2] * 20
    for sharded_row, row in zip(sharded["predictions"], plain["predictions"], strict=True):
        assert sharded_row == pytest.approx(row, abs=1e-4)
        assert sum(sharded_row) == pytest.approx(1.0, abs=1e-6)
