"""EasyDeL's tutorial, translated: by one YAML file, on real pairs where there are any, from training to the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import real_pairs
import tiny
from datasets import Dataset
from places import ROOT
from safetensors.torch import load_file

JOB = """
model_name_or_path: model
dataset_name: pairs
output_dir: run
frozen_parameters: embed_tokens
learning_rate: 1.0e-4
learning_rate_end: 5.0e-5
total_batch_size: 16
max_length: 256
truncation_mode: keep_end
center_rewards_coefficient: 0.1
max_steps: 12
max_shapes: 2
logging_steps: 1
do_eval: true
bf16: false
report_to: none
disable_tqdm: true
"""


def status_of(folder: Path, command: str, stop: bool = False) -> int:
    """That of a ``trl-tpu`` command, which a SIGTERM stops, if at all, when it has logged its first step."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-m", "trl_tpu.cli", *command.split()]
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")  # shown where an assertion fails
            if stop and "'loss'" in line:
                process.terminate()
                stop = False
    return process.returncode


@pytest.mark.long
def test_the_tutorial_is_stopped_resumed_scored_and_reported(tmp_path: Path) -> None:
    rows = sorted(real_pairs.best_pairs(264), key=lambda row: len(row["chosen"]) + len(row["rejected"]))
    for split, part in {"train": rows[40:], "test": rows[:40]}.items():  # these are too short to be cut
        Dataset.from_list(part).to_json(tmp_path / "pairs" / f"{split}.jsonl")
    tiny.save_tiny(tmp_path / "model", [row["chosen"] for row in rows])
    (tmp_path / "job.yaml").write_text(JOB)

    assert status_of(tmp_path, "reward --config job.yaml", stop=True) == 75
    assert status_of(tmp_path, "reward --config job.yaml --resume_from_checkpoint true") == 0
    logs = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    steps = {each["step"]: each for each in logs if "loss" in each}
    rates = {step: each["learning_rate"] for step, each in steps.items()}
    assert rates == pytest.approx({step: 1e-4 - 5e-5 * (step - 1) / 12 for step in range(1, 13)})
    assert steps[12]["epoch"] == pytest.approx(12 * 16 / 224)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "run"))
    assert {name for name, weight in before.items() if weight.equal(after[name])} == {"model.embed_tokens.weight"}

    split = "--dataset_name pairs --dataset_split test --output scored.jsonl"
    assert status_of(tmp_path, f"score --model_name_or_path run {split}") == 0
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    (accuracy,) = {each["eval_accuracy"] for each in logs if "eval_accuracy" in each}
    assert accuracy == pytest.approx(sum(row["reward_chosen"] > row["reward_rejected"] for row in scored) / 40)
    assert status_of(tmp_path, "report run scored.jsonl") == 0
    assert (tmp_path / "run" / "report" / "index.html").exists()
