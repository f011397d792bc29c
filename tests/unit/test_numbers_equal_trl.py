"""The loss of every step, and all that is logged with it, equals trl.RewardTrainer's in plain torch.

Each run is a process of its own, since a process holds one runtime. Tolerance 1e-4: float32 sums taken in another
order over 50 steps; what we see is below 1e-6.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from places import ROOT, SUPPORT

SETTINGS = {
    "plain torch": ({"USE_TORCH_XLA": "0"}, 8),
    "XLA, 1 device": ({"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}, 8),
    "XLA, 8 devices": ({"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}, 1),
}
LOGGED = ("loss", "grad_norm", "learning_rate", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")


def train(folder: Path, package: str, environment: dict[str, str], settings: dict[str, Any]) -> list[dict[str, float]]:
    out = folder / "logged.json"
    script = SUPPORT / "trajectory.py"
    command = [sys.executable, str(script), package, str(folder / "model"), str(folder / "pairs.jsonl"), str(out)]
    process = subprocess.run(
        [*command, json.dumps(settings)],
        env=os.environ | environment | {"HF_HUB_OFFLINE": "1", "CI": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [entry for entry in json.loads(out.read_text()) if "loss" in entry]


def assert_equal(
    ours: list[dict[str, float]], reference: list[dict[str, float]], keys: tuple[str, ...] = LOGGED
) -> None:
    assert len(ours) == len(reference)
    for step, (logged, expected) in enumerate(zip(ours, reference, strict=True), start=1):
        for key in keys:
            assert logged[key] == pytest.approx(expected[key], abs=1e-4), f"{key} at log {step}"
        assert logged["num_tokens"] == expected["num_tokens"], f"num_tokens at log {step}"


@pytest.fixture(scope="module")
def hh(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """The folder with model and data, and TRL's 50 steps."""
    folder = tmp_path_factory.mktemp("hh")
    pairs = tiny.hh_pairs(0, 1800)
    tiny.save_tiny(folder / "model", [*pairs["chosen"], *pairs["rejected"]])
    pairs.to_json(folder / "pairs.jsonl")
    plain_torch, batch = SETTINGS["plain torch"]
    return folder, train(folder, "trl", plain_torch, {"max_steps": 50, "per_device_train_batch_size": batch})


@tiny.needs_hh
@pytest.mark.parametrize("setting", SETTINGS)
def test_50_steps_on_real_pairs(hh: tuple[Path, list[dict[str, float]]], setting: str) -> None:
    folder, reference = hh
    environment, batch = SETTINGS[setting]
    settings = {"max_steps": 50, "per_device_train_batch_size": batch, "packing": False}
    assert_equal(train(folder, "trl_tpu", environment, settings), reference)


@tiny.needs_hh
@pytest.mark.parametrize("setting", ["plain torch", "XLA, 8 devices"])
def test_50_steps_in_packed_rows(hh: tuple[Path, list[dict[str, float]]], setting: str) -> None:
    """What pairs share is computed once; the loss of every step stays TRL's."""
    folder, reference = hh
    environment, batch = SETTINGS[setting]
    settings = {"max_steps": 50, "per_device_train_batch_size": batch}
    assert_equal(train(folder, "trl_tpu", environment, settings), reference)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("made_up")
    pairs = tiny.made_up_pairs(80, margin=True)
    tiny.save_tiny(folder / "model", [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]])
    pairs.to_json(folder / "pairs.jsonl")
    return folder, train(folder, "trl", {"USE_TORCH_XLA": "0"}, _ALL_AT_ONCE | {"per_device_train_batch_size": 8})


# margins, centering, accumulation, two epochs and a last batch that is short in pairs and in micro-batches
_ALL_AT_ONCE = {"gradient_accumulation_steps": 3, "center_rewards_coefficient": 0.01, "num_train_epochs": 2}


@pytest.mark.parametrize(
    ("setting", "packing"),
    [*((setting, True) for setting in SETTINGS), ("plain torch", False), ("XLA, 8 devices", False)],
)
def test_margins_centering_accumulation_and_epochs(
    made_up: tuple[Path, list[dict[str, float]]], setting: str, packing: bool
) -> None:
    folder, reference = made_up
    environment, batch = SETTINGS[setting]
    settings = _ALL_AT_ONCE | {"per_device_train_batch_size": batch, "packing": packing}
    ours = train(folder, "trl_tpu", environment, settings)
    # TRL averages what its micro-batches say, where we weigh every pair alike: the reward statistics differ by design
    assert_equal(ours, reference, ("loss", "grad_norm", "learning_rate"))
