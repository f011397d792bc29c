"""What a user changes holds on XLA: in the model, in methods and in settings, with TRL 1.16's losses (to 1e-5)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apart
import customized_models as customized
import every_setting
import overridden
import pytest
import search
import trl
from training import logged, trained

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
    process = apart.run("customized_models.py", name, USE_TORCH_XLA="0")
    make = getattr(customized, name)
    trainer, losses = customized.losses(trl_tpu, make(), tmp_path)
    assert losses == pytest.approx(json.loads(process.stdout.splitlines()[-1]), abs=1e-5)
    assert (trainer.batch_plan.shapes is None) == (make in customized.KEEP_LENGTHS)


def test_a_loss_pasted_from_trl_trains(tmp_path: Path) -> None:
    class Pasted(trl_tpu.RewardTrainer):
        compute_loss: Any = trl.RewardTrainer.compute_loss

    args = trl_tpu.RewardConfig(str(tmp_path), **customized.SETTINGS | {"max_steps": 2, "max_shapes": 1})
    data = {"train_dataset": customized.PAIRS, "processing_class": customized.TOKENIZER}
    theirs, ours = (trained(each(customized.plain(), args, **data)) for each in (Pasted, trl_tpu.RewardTrainer))
    for pasted, own in zip(logged(theirs), logged(ours), strict=True):
        for name in ("loss", "num_tokens", "accuracy", "margin", "max_reward"):
            assert pasted[name] == pytest.approx(own[name], abs=1e-5), name


def test_a_search_of_hyperparameters_trains_each_trial_as_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, alone = search.losses(tmp_path, monkeypatch, afterwards=True)
    assert found == pytest.approx(alone, abs=1e-6)


def test_a_host_has_a_process_that_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = trl_tpu.RewardConfig(str(tmp_path), report_to="none")
    trainer = trl_tpu.RewardTrainer(
        customized.plain(), args, train_dataset=customized.PAIRS, processing_class=customized.TOKENIZER
    )
    trainer.accelerator.print("said")
    assert "said" in capsys.readouterr().out and trainer.accelerator.is_local_main_process


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("check", every_setting.CHECKS)
def test_every_setting_is_obeyed_refused_or_listed(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


def test_overrides_are_called_in_every_part_of_a_run(tmp_path: Path) -> None:
    """As where TRL calls them, but for what a guide lists with the reason."""
    process = apart.run("overridden.py", "trl", str(tmp_path / "theirs"), USE_TORCH_XLA="0")
    theirs = json.loads(process.stdout.splitlines()[-1])
    ours = overridden.run(trl_tpu, tmp_path / "ours", max_shapes=1)
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert overridden.not_called(theirs, ours) <= overridden.listed()
