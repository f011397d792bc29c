"""Where accelerate and transformers take their TPU branches, nothing that is float32 becomes bfloat16."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xla_flags
from chosen import chosen
from places import ROOT, SUPPORT

KINDS = ["full"]
LONG_KINDS = ["lora", "padded"]


def run(folder: Path, *kinds: str) -> dict[str, Any]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FLAGS": xla_flags.QUICK}
    process = subprocess.run(
        [sys.executable, str(SUPPORT / "tpu_branches.py"), str(folder), *kinds],
        env=plain | devices | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was found of the kinds that were chosen."""
    return run(tmp_path_factory.mktemp("trained"), *chosen(request, "kind"))


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG_KINDS)])
def test_state_stays_float32(trained: dict[str, Any], kind: str) -> None:
    found = trained[kind]
    assert "accelerate.state" in found["asked for a TPU"]
    assert found["environment"] in (
        {"XLA_USE_BF16": None, "XLA_DOWNCAST_BF16": None},
        {"XLA_USE_BF16": "0", "XLA_DOWNCAST_BF16": "0"},
    )
    assert found["computes in bfloat16"]
    assert found["in packed rows"] == ("padded" not in kind)
    for name in ("weights", "norms", "buffers", "optimizer", "saved weights", "saved optimizer"):
        assert found[name] == ["torch.float32"], name
    assert found["inside"]["loss"] == "torch.float32"
    if kind != "lora":  # whose layers are wrapped
        assert found["inside"]["q_proj"] == "torch.bfloat16"
        assert found["inside"]["score"] == "torch.float32"
    assert found["rewards"] == "float32"
    assert found["fine losses"] and found["fine rewards"]
    # an embedding, a norm, the rotary frequencies, and Adam's step and moments
    assert found["device keeps float32"] == [True] * 6
