"""Every setting is obeyed, refused, or listed in a guide, on XLA; so is every argument of the trainer."""

from collections.abc import Callable
from pathlib import Path

import customized_models as customized
import every_setting
import pytest
import tiny

from trl_tpu import RewardConfig, RewardTrainer


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("check", every_setting.CHECKS)
def test_every_setting_is_obeyed_refused_or_listed(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


def test_an_evaluation_is_of_the_first_batches_of_pairs_that_are_cut(tmp_path: Path) -> None:
    limits = {"max_length": 12, "truncation_mode": "keep_end", "max_eval_steps": 2, "per_device_eval_batch_size": 4}
    args = RewardConfig(str(tmp_path), **customized.SETTINGS | limits)
    made, tokenizer, pairs = customized.plain(), customized.TOKENIZER, tiny.made_up_pairs(14, seed=3)
    trainer = RewardTrainer(made, args, train_dataset=customized.PAIRS, eval_dataset=pairs, processing_class=tokenizer)
    found, rewards_N2 = trainer.evaluate(), trainer.predict(pairs).predictions
    columns = (trainer.eval_dataset[:][column] for column in ("chosen_ids", "rejected_ids"))  # type: ignore[index]
    assert max(len(ids) for column in columns for ids in column) == 12
    assert found["eval_pairs"] == 8 < len(rewards_N2)
    assert found["eval_mean_reward"] == pytest.approx(rewards_N2[:8].mean(), abs=1e-6)
