"""What a user sees while it trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import PrinterCallback, ProgressCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.training.progress import Progress

MakeTrainer = Callable[..., RewardTrainer]


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> MakeTrainer:
    folder, pairs = tmp_path_factory.mktemp("model"), tiny.made_up_pairs(24)
    model = tiny.save_tiny(folder, [text for row in pairs for text in row.values()])

    def make(out: Path, **settings: Any) -> RewardTrainer:
        defaults = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 4, "bf16": False}
        defaults |= {"report_to": "none", "eval_strategy": "steps", "eval_steps": 4, "save_steps": 2}
        args = RewardConfig(str(out), **defaults | settings)
        return RewardTrainer(model, args, train_dataset=pairs, eval_dataset=pairs.select(range(8)))

    return make


def test_the_bar_goes_on_from_a_resume_and_lines_leave_out_what_is_for_trackers(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(tmp_path).train()
    capsys.readouterr()
    trainer = make_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if "'loss'" in line]
    assert len(lines) == 1 and "'accuracy'" in lines[0] and "'pairs_per_second'" in lines[0]
    assert not {name for name in ("grad_norm", "memory_gib", "min_reward") if name in lines[0]}
    assert "50%" in shown.err and "\r 25%" not in shown.err
    assert "'eval_accuracy'" in shown.out + shown.err


def test_a_user_who_wants_no_bar_has_none(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    kinds = {type(each) for each in make_trainer(tmp_path, disable_tqdm=True).callback_handler.callbacks}
    assert PrinterCallback in kinds and not kinds & {ProgressCallback, Progress}
    assert Progress in {type(each) for each in make_trainer(tmp_path).callback_handler.callbacks}
