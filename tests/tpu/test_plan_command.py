"""``trl-tpu plan`` with the real compiler: its figures agree with the plan's own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import trl_tpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2, **sizes).save_pretrained(folder)
    return str(folder)


def planned(model: str, words: str) -> tuple[int, dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PJRT", "CPU_NUM", "USE_"))}
    environment |= {"PYTHONPATH": str(Path(trl_tpu.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "trl_tpu.cli", "plan", "--model_name_or_path", model, "--json", "true"]
    done = subprocess.run(
        [*command, "--report_to", "none", *words.split()], capture_output=True, text=True, env=environment
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_compilers_arguments_are_the_state_that_the_plan_counts_and_the_batch(model: str) -> None:
    status, said = planned(model, "--topology v6e:2x2 --row_length 256 --per_device_train_batch_size 1")
    assert status == 0
    assert said["fits"] is True
    kinds = said["memory_by_kind"]
    assert 0 < kinds["batch and other inputs"] < 2**20  # which small arrays are padded in
    assert said["aliased_bytes"] >= 0.99 * said["state_bytes"]
    assert said["flops_compiled"] >= said["flops_needed"]
    assert set(said["traffic"]) == {"fsdp"}


def test_without_checkpointing_memory_is_what_the_backward_waits_for(tmp_path: Path) -> None:
    """Layers with heads of 64 features and a table of 112 a chip, which fill no 128 lanes, take at most 1.15 of it.

    It was 1.23 while copies of the table's moments were held all step, and by each layer what its kept tensors are
    made of.
    """
    sizes = {"hidden_size": 448, "intermediate_size": 2432, "num_hidden_layers": 6, "vocab_size": 32768}
    heads = {"num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True}
    AutoConfig.for_model("qwen2", **sizes, **heads).save_pretrained(tmp_path)
    rows = "--topology v5e:2x2 --row_length 2048 --per_device_train_batch_size 1"
    status, said = planned(str(tmp_path), f"{rows} --gradient_checkpointing false --all_layers true")
    assert status == 0
    assert 0.9 <= said["memory_peak"] / said["memory_bound"] <= 1.15
