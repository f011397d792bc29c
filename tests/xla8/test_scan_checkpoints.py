"""Layers that run as a loop are held as one, and nothing that is saved shows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from counters import CountSaves
from peft import LoraConfig
from safetensors.torch import load_file
from training import differing, state_of
from transformers import TrainerCallback

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import tensors_in
from trl_tpu.runtime import current

SETTINGS: dict[str, Any] = {
    "mesh": "data=2,fsdp=2,tensor=2",
    "per_device_train_batch_size": 2,
    "packing": False,
    "pad_to_multiple_of": 64,
    "max_steps": 4,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "weight_decay": 0.1,  # of all but norms and biases
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(scope="module")
def runs(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, CountSaves]:
    """Four steps with a checkpoint after two, by whether the layers were a loop."""
    from trl_tpu import RewardConfig

    made = {}
    for scan in (False, True):
        folder = str(tmp_path_factory.mktemp(f"scan-{scan}"))
        args = RewardConfig(folder, bf16=False, report_to="none", scan_layers=scan, learning_rate=1e-3, **SETTINGS)
        made[scan] = CountSaves(model_folder, args, train_dataset=tiny.made_up_pairs(64))
        made[scan].train()
    return made


def test_checkpoints_have_every_layer_by_its_own_name(runs: dict[bool, CountSaves]) -> None:
    states, exports = {}, {}
    for scan, trainer in runs.items():
        folder = Path(str(trainer.args.output_dir), "checkpoint-4")
        states[scan] = {name: tensor.shape for name, tensor in tensors_in(folder / "state").items()}
        exports[scan] = load_file(folder / "model.safetensors")
        for name, weight in state_of(trainer).items():
            assert " " in name or torch.equal(exports[scan][name], weight), name  # of the optimizer
    assert states[True] == states[False]
    assert exports[True].keys() == exports[False].keys()
    assert any("optimizer.model.layers.1." in name and name.endswith(".exp_avg_sq") for name in states[True])


def test_a_save_compiles_nothing(runs: dict[bool, CountSaves]) -> None:
    assert runs[True].compiles_of_saves == [0, 0]


def test_training_and_its_state_are_those_of_layers_one_by_one(runs: dict[bool, CountSaves]) -> None:
    """1e-5 of weights around 1: sums in another order, over four steps of Adam at a rate of 1e-3."""
    assert_alike(state_of(runs[True]), state_of(runs[False]))
    logs = [
        [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
        for trainer in (runs[False], runs[True])
    ]
    for one_by_one, scanned in zip(*logs, strict=True):
        assert scanned == pytest.approx(one_by_one, abs=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_a_run_of_either_kind_resumes_in_both(
    runs: dict[bool, CountSaves], config: Callable[..., Any], model_folder: str, scan: bool
) -> None:
    """From its own kind's checkpoint to the bit, from the other's within the same tolerance."""
    for begun in (scan, not scan):
        args = config(scan_layers=scan, **SETTINGS | {"save_strategy": "no"})
        resumed = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(64))
        resumed.train(resume_from_checkpoint=f"{runs[begun].args.output_dir}/checkpoint-2")
        assert begun != scan or differing(resumed, runs[begun]) == []
        assert_alike(state_of(resumed), state_of(runs[begun]))


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


class SavingElsewhere(TrainerCallback):
    """What a user's own callback may do with the model between steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            current().step_boundary()  # or each tensor would be computed by itself, rounded its own way
            state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            model.save_pretrained(self._folder, state_dict=state)


def test_adapters_are_saved_by_layer_and_the_best_are_loaded(
    config: Callable[..., Any], model_folder: str, tmp_path: Path
) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": False}
    args = config(scan_layers=True, **SETTINGS, metric_for_best_model="loss", **best)
    pairs = tiny.made_up_pairs(64)
    trainer = RewardTrainer(
        model_folder,
        args,
        train_dataset=pairs,
        eval_dataset=pairs.select(range(16)),
        peft_config=LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear"),
        callbacks=[SavingElsewhere(tmp_path / "elsewhere")],
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    folders = {name: tmp_path / name for name in ("saved", "checkpoint-4", "elsewhere", "checkpoint-2")}
    adapters = {name: load_file(folder / "adapter_model.safetensors") for name, folder in folders.items()}
    saved = adapters.pop("saved")
    assert any(".layers.1." in name and "lora_B" in name for name in saved)
    differing = {
        folder: [name for name, weight in saved.items() if not torch.equal(others[name], weight)]
        for folder, others in adapters.items()
        if others.keys() == saved.keys()
    }
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert differing.pop("checkpoint-2")
    assert differing == {"checkpoint-4": [], "elsewhere": []}
