"""A model on a mesh can be exported from its devices, and from its sharded state without torch_xla."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import gather_full_weights, trained_weights, write_state

OFFLINE = """
import sys
assert "torch_xla" not in sys.modules
sys.modules["torch_xla"] = None  # as if it were not installed
from trl_tpu.cli import main
sys.exit(main(["export", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", pytest.param("fsdp=8", marks=pytest.mark.long)])
def test_both_exports_equal_the_model_on_the_devices(
    mesh: str, model_folder: str, config: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = RewardTrainer(model_folder, config(mesh=mesh), train_dataset=tiny.made_up_pairs(8))
    runtime = trainer.trl_tpu.runtime
    before = runtime.compile_count()
    trainer.save_model(str(tmp_path / "live"))
    assert runtime.compile_count() == before
    expected = gather_full_weights(trainer.model, runtime, keeps=True)
    live = load_file(tmp_path / "live" / "model.safetensors")
    assert live.keys() == expected.keys() and all(live[name].equal(expected[name]) for name in live)
    scored = AutoModelForSequenceClassification.from_pretrained(tmp_path / "live", num_labels=1)
    assert all(expected[name].equal(tensor) for name, tensor in scored.state_dict().items())

    checkpoint = tmp_path / "checkpoint-1"
    trainer.model.save_pretrained(checkpoint, state_dict={})
    weights = {f"model.{name}": tensor for name, tensor in trained_weights(trainer.model).items()}
    write_state(runtime.local_shards(weights), checkpoint / "state", runtime)
    assert len(list((checkpoint / "state").glob("*.safetensors"))) > 1
    subprocesses.run("-c", OFFLINE, str(checkpoint), str(tmp_path / "offline"), USE_TORCH_XLA="0")
    live_file, offline_file = (tmp_path / way / "model.safetensors" for way in ("live", "offline"))
    assert live_file.read_bytes() == offline_file.read_bytes()
