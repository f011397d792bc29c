"""Before a shape is compiled, the bar says which of how many; logs have the rates of plain torch, and programs."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import tiny

from trl_tpu import RewardTrainer


def test_the_bar_says_each_shape_before_it_is_compiled_and_logs_have_the_rates(
    config: Callable[..., Any], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tiny.made_up_pairs(64)
    args = config(max_steps=4, logging_steps=1, disable_tqdm=False, packing=False, max_shapes=2, eval_strategy="steps")
    args.eval_steps = 3
    trainer = RewardTrainer(model_folder, args, train_dataset=pairs, eval_dataset=pairs.select(range(20)))
    planned = trainer.batch_plan.shapes
    trainer.train()
    said = list(dict.fromkeys(re.findall(r"compiling shape [^:]*", capsys.readouterr().err)))
    evaluation = [each for each in said if each.endswith(" for evaluation")]
    training = [each for each in said if each not in evaluation]
    assert evaluation[0] == "compiling shape 1 for evaluation"
    assert training == [f"compiling shape {number} of {planned}" for number in range(1, len(training) + 1)]
    assert planned is not None and 1 <= len(training) <= planned
    log = trainer.state.log_history[0]
    assert 0 < log["pairs_per_second"] < log["tokens_per_second"] and log["model_tflops_per_second"] > 0
    assert log["seconds_per_step"] > 0 and log["compiled_programs"] >= 1
    assert 0.1 < log["memory_gib"] < 100 and "mfu" not in log
