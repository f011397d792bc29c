"""What a user changed in the model is what trains on XLA, with TRL 1.16's losses (tolerance 1e-5)."""

import json
import os
from pathlib import Path
from typing import Any

import apart
import customized_models as customized
import pytest
import search
import trl
from places import SUPPORT

import trl_tpu


@pytest.mark.parametrize(
    "name",
    [
        "prompt_tuning",  # reads the last column, whatever is in it
        "dynamic_rope",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("averaging", "normalized_head", "prefix_tuning", "longrope")
        ),
    ],
)
def test_losses_are_trls(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"USE_TORCH_XLA": "0"}
    process = apart.python(str(SUPPORT / "customized_models.py"), name, environment=environment)
    assert process.returncode == 0, process.stderr[-4000:]
    make = getattr(customized, name)
    trainer, losses = customized.losses(trl_tpu, make(), tmp_path)
    assert losses == pytest.approx(json.loads(process.stdout.splitlines()[-1]), abs=1e-5)
    assert (trainer.batch_plan.shapes is None) == (make in customized.KEEP_LENGTHS)


def test_a_loss_pasted_from_trl_trains(tmp_path: Path) -> None:
    class Pasted(trl_tpu.RewardTrainer):
        compute_loss: Any = trl.RewardTrainer.compute_loss

    logs = []
    for trainer_class in (Pasted, trl_tpu.RewardTrainer):
        args = trl_tpu.RewardConfig(str(tmp_path), **customized.SETTINGS | {"max_steps": 2})
        trainer = trainer_class(
            customized.plain(), args, train_dataset=customized.PAIRS, processing_class=customized.TOKENIZER
        )
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for theirs, ours in zip(*logs, strict=True):
        for name in ("loss", "num_tokens", "accuracy", "margin", "max_reward"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5), name


@pytest.mark.parametrize("afterwards", [False, True])
def test_a_search_of_hyperparameters_trains_each_trial_as_by_itself(
    afterwards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, alone = search.losses(tmp_path, monkeypatch, afterwards)
    assert found == pytest.approx(alone, abs=1e-6)


def test_a_host_has_a_process_that_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = trl_tpu.RewardConfig(str(tmp_path), report_to="none")
    trainer = trl_tpu.RewardTrainer(
        customized.plain(), args, train_dataset=customized.PAIRS, processing_class=customized.TOKENIZER
    )
    trainer.accelerator.print("said")
    assert "said" in capsys.readouterr().out and trainer.accelerator.is_local_main_process
