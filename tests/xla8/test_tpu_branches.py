"""In the TPU branches of accelerate and transformers, float32 state does not become bfloat16."""

import json
import os
from pathlib import Path

import subprocesses
from environment import QUICK_XLA_FLAGS, SUPPORT


def test_state_stays_float32_in_tpu_branches(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FLAGS": QUICK_XLA_FLAGS}
    words = (str(SUPPORT / "tpu_branches.py"), str(tmp_path))
    printed = subprocesses.run_without_server(*words, environment=plain, **devices)
    found = json.loads(printed.splitlines()[-1])
    assert "accelerate.state" in found["asked for a TPU"]
    assert found["computes in bfloat16"]
    assert found["in packed rows"]
    for name in ("weights", "buffers", "optimizer", "saved weights", "saved optimizer"):
        assert found[name] == ["torch.float32"], name
    assert found["inside"]["loss"] == "torch.float32"
    assert (found["inside"]["q_proj"], found["inside"]["score"]) == ("torch.bfloat16", "torch.float32")
    assert found["rewards"] == "float32"
    assert found["fine losses"] and found["fine rewards"]
    # embedding, norm, rotary frequencies, Adam's step and moments
    assert found["device keeps float32"] == [True] * 6
