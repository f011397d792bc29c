"""`--push_to_hub` in the example script uploads a model that loads again, with a hub on the loopback address."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hub_server
import overridden
import pytest
import subprocesses
import tiny
from environment import EXAMPLES, ROOT
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file

import trl_tpu
from trl_tpu.checkpoint.folders import find_faults

EXAMPLE = EXAMPLES / "reward_modeling.py"
Run = Callable[..., subprocess.CompletedProcess[str]]
LOAD_AND_SCORE = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
for name in sys.argv[1:]:
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    print(json.dumps(model(**tokenizer("Count on from 3: 4 5 6", return_tensors="pt")).logits.tolist()))
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[hub_server.Hub, Path]]:
    with hub_server.serve(token="x") as hub:
        yield hub, tmp_path_factory.mktemp("hf_home")


@pytest.fixture
def hub(serving: tuple[hub_server.Hub, Path]) -> hub_server.Hub:
    """Return an empty hub, and clear the client's cache of the user."""
    hub, home = serving
    shutil.rmtree(home)
    home.mkdir()
    hub.forget()
    return hub


@pytest.fixture
def run(hub: hub_server.Hub, serving: tuple[hub_server.Hub, Path], tmp_path: Path) -> Run:
    """Return a function that runs Python with the real Hub client, connected to this hub without user settings."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(serving[1]), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT), "USE_TORCH_XLA": "0"}
    return partial(subprocesses.python, environment=environment, folder=tmp_path)


def train_and_push(run: Run, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    pairs = tiny.made_up_pairs(16)
    model = tiny.save_tiny(folder / "base", pairs)
    (folder / "pairs").mkdir()
    pairs.to_json(folder / "pairs" / "train.jsonl")
    arguments = {"model_name_or_path": model, "dataset_name": str(folder / "pairs"), "output_dir": str(folder / "out")}
    arguments |= {"dtype": "float32", "max_steps": "2", "per_device_train_batch_size": "4", "learning_rate": "1e-3"}
    arguments |= {"report_to": "none", "hub_model_id": "user/tiny-rm", "hub_token": "x"} | more
    flags = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    return run(str(EXAMPLE), *flags, "--push_to_hub")


def test_pushed_model_equals_the_trained_one(hub: hub_server.Hub, run: Run, tmp_path: Path) -> None:
    """An upload during training fails and is reported; the last upload contains all files."""
    hub.failures = [("/commit/", 403)]
    process = train_and_push(run, tmp_path)
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stderr.count("user/tiny-rm FAILED") == 1
    assert hub.unknown == []
    pushed = hub.files["user/tiny-rm"]
    assert not [path for path in pushed if path.startswith("_")]
    loaded = run("-c", LOAD_AND_SCORE, "user/tiny-rm", str(tmp_path / "out"))
    assert loaded.returncode == 0, loaded.stderr[-4000:]
    from_hub, from_folder = (json.loads(line) for line in loaded.stdout.splitlines())
    assert from_hub == from_folder

    saved, base = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    weights = load(pushed["model.safetensors"])
    assert weights.keys() == saved.keys() == base.keys()
    assert all(weights[name].equal(saved[name]) for name in saved)
    assert not all(weights[name].equal(base[name]) for name in base), "two steps change the weights"

    card = ModelCard(pushed["README.md"].decode())
    assert {"trl", "reward-trainer"} <= set(card.data.tags)
    assert str(tmp_path) not in card.content, "local paths mean nothing on the Hub"
    assert not [path for path in pushed if path.endswith((".pt", ".pth"))], "optimizer state is not pushed"
    assert {repo for repo, _ in hub.commits} == {"user/tiny-rm"}
    assert "End of training" in [summary for _, summary in hub.commits]


def test_adapters_of_a_run_at_a_url_are_pushed_at_the_end(hub: hub_server.Hub, run: Run, tmp_path: Path) -> None:
    """The Hub accepts their model card. Checkpoints are not on this disk, so they are not pushed, with a warning."""
    adapters = {"use_peft": "true", "lora_task_type": "SEQ_CLS"}
    process = train_and_push(run, tmp_path, output_dir="memory://bucket/run", save_steps="1", **adapters)
    assert process.returncode == 0 and "FAILED" not in process.stderr, process.stderr[-4000:]
    for step in (1, 2):
        assert f"memory://bucket/run/checkpoint-{step} is not pushed" in process.stderr
    summaries = {summary for _, summary in hub.commits}
    assert "End of training" in summaries and not [each for each in summaries if "in progress" in each]
    pushed = hub.files["user/tiny-rm"]
    assert load(pushed["adapter_model.safetensors"])
    card = ModelCard(pushed["README.md"].decode())
    assert "reward-trainer" in card.data.tags and str(tmp_path) not in card.content


def test_failed_upload_is_reported_and_changes_nothing(hub: hub_server.Hub, run: Run, tmp_path: Path) -> None:
    repo = "user/tiny-rm"
    hub.failures = [("/commit/", 403)] * 2  # the upload during training, and the last one
    process = train_and_push(run, tmp_path)
    assert process.returncode != 0 and hub.failures == []
    assert f"{repo} FAILED" in process.stderr and "403 Forbidden" in process.stderr
    assert hub.files == {repo: {}} and hub.commits == []
    assert find_faults(tmp_path / "out" / "checkpoint-2") == []


def test_overrides_are_called_in_every_phase_of_a_run(hub: hub_server.Hub, run: Run, tmp_path: Path) -> None:
    """Overrides are called in the same phases as in TRL, except those listed in a guide with the reason."""
    found = {}
    for package in ("trl", "trl_tpu"):
        process = run(overridden.__file__, package, str(tmp_path / package))
        assert process.returncode == 0, process.stderr[-4000:]
        found[package] = json.loads(process.stdout.splitlines()[-1])
    theirs, ours = found.values()
    assert {repo for repo, _ in hub.commits} == {"user/overridden"}
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    assert overridden.not_called(theirs, ours) == overridden.listed()
    for name in theirs["reading"]:  # overriding a method that reads batches makes them padded
        own = type("Own", (trl_tpu.RewardTrainer,), {name: lambda *_: None})
        assert own.__new__(own).reads_padded_rows() == name
