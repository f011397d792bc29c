"""`--push_to_hub` uploads a model that loads from the Hub: the example script, with a hub on the loopback address."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hub_server
import tiny
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "reward_modeling.py"
LOAD_AND_SCORE = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
name = sys.argv[1]
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1).eval()
tokenizer = AutoTokenizer.from_pretrained(name)
print(json.dumps(model(**tokenizer("Count on from 3: 4 5 6", return_tensors="pt")).logits.tolist()))
"""


def run(folder: Path, hub: hub_server.Hub, *command: str) -> subprocess.CompletedProcess:
    """Run Python with the real Hub client, which sees this hub and nothing of the user's own settings."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(folder / "hf_home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(TESTS.parent),
        "USE_TORCH_XLA": "0",
    }
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def train_and_push(folder: Path, hub: hub_server.Hub, token: str) -> subprocess.CompletedProcess:
    pairs = tiny.made_up_pairs(16)
    model = tiny.save_tiny(folder / "base", [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]])
    (folder / "pairs").mkdir()
    pairs.to_json(folder / "pairs" / "train.jsonl")
    arguments = {
        "model_name_or_path": model,
        "dtype": "float32",
        "dataset_name": str(folder / "pairs"),
        "output_dir": str(folder / "out"),
        "max_steps": "2",
        "per_device_train_batch_size": "4",
        "learning_rate": "1e-3",
        "report_to": "none",
        "hub_model_id": "user/tiny-rm",
        "hub_token": token,
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    return run(folder, hub, str(EXAMPLE), *flags, "--push_to_hub")


def test_the_pushed_model_is_the_trained_one_and_loads_from_the_hub(tmp_path: Path) -> None:
    with hub_server.serve(token="x") as hub:
        process = train_and_push(tmp_path, hub, token="x")
        assert process.returncode == 0, process.stderr[-4000:]
        assert hub.unknown == []
        pushed = hub.files["user/tiny-rm"]
        loaded = [run(tmp_path, hub, "-c", LOAD_AND_SCORE, name) for name in ("user/tiny-rm", str(tmp_path / "out"))]
        assert [each.returncode for each in loaded] == [0, 0], loaded[0].stderr[-4000:]
    assert json.loads(loaded[0].stdout) == json.loads(loaded[1].stdout)

    saved, base = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    weights = load(pushed["model.safetensors"])
    assert weights.keys() == saved.keys() == base.keys()
    assert all(weights[name].equal(saved[name]) for name in saved)
    assert not all(weights[name].equal(base[name]) for name in base), "two steps change the weights"

    model_config = json.loads(pushed["config.json"])
    assert list(model_config["id2label"]) == ["0"]
    vocabulary = json.loads(pushed["tokenizer.json"])["model"]["vocab"]
    pad_token = json.loads(pushed["tokenizer_config.json"])["pad_token"]
    assert model_config["pad_token_id"] == vocabulary[pad_token]
    assert "message['role']" in pushed["chat_template.jinja"].decode()

    card = ModelCard(pushed["README.md"].decode())
    assert {"trl", "reward-trainer"} <= set(card.data.tags)
    assert card.data.model_name == "tiny-rm"
    assert str(tmp_path) not in card.content, "a local path names nothing on the Hub"
    assert not [path for path in pushed if path.endswith((".pt", ".pth"))], "optimizer state stays here"
    assert {repo for repo, _ in hub.commits} == {"user/tiny-rm"}
    assert "End of training" in [summary for _, summary in hub.commits]


def test_a_wrong_token_fails_before_training(tmp_path: Path) -> None:
    with hub_server.serve(token="x") as hub:
        process = train_and_push(tmp_path, hub, token="wrong")
    assert process.returncode != 0
    assert "401" in process.stderr
    assert hub.files == {}
    assert not (tmp_path / "out" / "model.safetensors").exists()
