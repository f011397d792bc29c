"""Layers that run as a loop are stacked in memory, but saved separately."""

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

SETTINGS: dict[str, Any] = {"mesh": "data=2,fsdp=2,tensor=2", "packing": False, "pad_to_multiple_of": 64}
SETTINGS |= {"max_steps": 4, "logging_steps": 2, "save_strategy": "steps", "save_steps": 2}
SETTINGS |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
SETTINGS |= {"weight_decay": 0.1}  # applies to all but norms and biases


@pytest.fixture(scope="module")
def runs(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, CountSaves]:
    """Return runs of four steps with a checkpoint after two, without and with the loop."""
    from trl_tpu import RewardConfig

    made = {}
    for scan in (False, True):
        folder = str(tmp_path_factory.mktemp(f"scan-{scan}"))
        args = RewardConfig(folder, bf16=False, report_to="none", scan_layers=scan, learning_rate=1e-3, **SETTINGS)
        made[scan] = CountSaves(model_folder, args, train_dataset=tiny.made_up_pairs(64))
        made[scan].train()
    return made


def test_checkpoints_name_every_layer_separately(runs: dict[bool, CountSaves]) -> None:
    states, exports = {}, {}
    for scan, trainer in runs.items():
        folder = Path(str(trainer.args.output_dir), "checkpoint-4")
        states[scan] = {name: tensor.shape for name, tensor in tensors_in(folder / "state").items()}
        exports[scan] = load_file(folder / "model.safetensors")
        for name, weight in state_of(trainer).items():
            assert " " in name or torch.equal(exports[scan][name], weight), name  # skips optimizer state
    assert states[True] == states[False]
    assert exports[True].keys() == exports[False].keys()
    assert any("optimizer.model.layers.1." in name and name.endswith(".exp_avg_sq") for name in states[True])


def test_save_compiles_nothing(runs: dict[bool, CountSaves]) -> None:
    assert runs[True].compiles_of_saves == [0, 0]


@pytest.mark.parametrize("scan", [True, False])
def test_scanned_and_unscanned_runs_resume_each_other(runs: Any, config: Any, model_folder: str, scan: bool) -> None:
    """Resumes are bitwise from the same kind of run.

    From the other kind, weights of about 1 differ by at most 1e-5: sums have another order over two steps of Adam.
    """
    for begun in (scan, not scan):
        args = config(scan_layers=scan, **SETTINGS | {"save_strategy": "no"})
        resumed = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(64))
        resumed.train(resume_from_checkpoint=f"{runs[begun].args.output_dir}/checkpoint-2")
        assert begun != scan or differing(resumed, runs[begun]) == []
        assert_close(state_of(resumed), state_of(runs[begun]))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


class SavingCallback(TrainerCallback):
    """Saves the model between steps, as a user's callback may."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            current().step_boundary()  # otherwise each tensor would be computed separately, with different rounding
            state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            model.save_pretrained(self._folder, state_dict=state)


def test_adapters_are_saved_by_layer_and_the_best_are_loaded(config: Any, model_folder: str, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": False}
    args = config(scan_layers=True, **SETTINGS, metric_for_best_model="loss", **best)
    pairs = tiny.made_up_pairs(64)
    trainer = RewardTrainer(
        model_folder,
        args,
        train_dataset=pairs,
        eval_dataset=pairs.select(range(16)),
        peft_config=LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear"),
        callbacks=[SavingCallback(tmp_path / "elsewhere")],
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
