"""Customized models, methods and settings work on XLA, with TRL 1.16's losses (to 1e-5)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import customized_models as customized
import every_setting
import hyperparameter_search
import overridden
import pytest
import subprocesses
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from training import logged, trained

import trl_tpu

DATA = {"train_dataset": customized.PAIRS, "processing_class": customized.TOKENIZER}
MODELS = [
    "prompt_tuning",  # reads the last column, also if it is padding
    "dynamic_rope",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("averaging", "normalized_head", "prefix_tuning", "longrope")
    ),
]


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_customized_models_equal_trls(name: str, tmp_path: Path) -> None:
    process = subprocesses.run("customized_models.py", name, USE_TORCH_XLA="0")
    make = getattr(customized, name)
    trainer, losses = customized.losses(trl_tpu, make(), tmp_path)
    assert losses == pytest.approx(json.loads(process.stdout.splitlines()[-1]), abs=1e-5)
    assert (trainer.batch_plan.layout.shapes is None) == (make in customized.KEEP_LENGTHS)


def test_optimizer_and_schedule_of_a_subclass_need_no_super(tmp_path: Path) -> None:
    class Own(trl_tpu.RewardTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = AdamW((model or self.model).parameters(), lr=self.args.learning_rate, weight_decay=0.0)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: 1 - step / num_training_steps)
            return self.lr_scheduler

    args = trl_tpu.RewardConfig(str(tmp_path), **customized.SETTINGS | {"max_steps": 4, "max_shapes": 1})
    own, ours = (trained(each(customized.plain(), args, **DATA)) for each in (Own, trl_tpu.RewardTrainer))
    assert logged(own) == logged(ours)
    assert [each for each in own.optimizer.param_groups if each["capturable"]] == own.optimizer.param_groups


def test_search_trains_trials_as_separate_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, alone = hyperparameter_search.losses(tmp_path, monkeypatch, afterwards=True)
    assert found == pytest.approx(alone, abs=1e-6)


def test_first_process_of_each_host_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = trl_tpu.RewardConfig(str(tmp_path), report_to="none")
    trainer = trl_tpu.RewardTrainer(customized.plain(), args, **DATA)
    trainer.accelerator.print("said")
    assert "said" in capsys.readouterr().out and trainer.accelerator.is_local_main_process


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("check", every_setting.CHECKS)
def test_every_setting_is_applied_rejected_or_listed(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


def test_overrides_are_called_in_every_phase_of_a_run(tmp_path: Path) -> None:
    """Phases equal TRL's, except for methods listed in a guide with the reason."""
    process = subprocesses.run("overridden.py", "trl", str(tmp_path / "theirs"), USE_TORCH_XLA="0")
    theirs = json.loads(process.stdout.splitlines()[-1])
    ours = overridden.run(trl_tpu, tmp_path / "ours", max_shapes=1)
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert overridden.not_called(theirs, ours) <= overridden.listed()
