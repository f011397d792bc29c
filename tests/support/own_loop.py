"""Runs `examples/own_loop.py` beside `RewardTrainer`, in this process, for plain torch and for XLA devices."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import DatasetDict
from places import EXAMPLES
from training import trained
from transformers import AutoModelForSequenceClassification

from trl_tpu import RewardTrainer
from trl_tpu.runtime import current

#: Two passes, whose last batch is short.
SETTINGS: dict[str, Any] = {
    **{"max_steps": 11, "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 5},
    **{"center_rewards_coefficient": 0.01, "max_shapes": 2, "learning_rate": 3e-4},
}


def compare(config: Callable[..., Any], model_folder: str, folder: Path) -> list[int]:
    """Hold what the loop logs and saves against the trainer; return how many programs there were at each log.

    Tolerance 1e-6: on XLA their steps are other programs, which may add up in another order. The rate is small, since
    Adam makes whole steps of the rounding in gradients near 0.
    """
    spec = importlib.util.spec_from_file_location("own_loop_example", EXAMPLES / "own_loop.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    data = DatasetDict(train=tiny.uneven_pairs(45, margin=True), test=tiny.uneven_pairs(21, seed=1))
    args, compiled, logged = config(**SETTINGS), [], []
    args.output_dir = str(folder / "own")
    for logs in example.train(model_folder, data, args):
        logged.append(logs)
        compiled.append(current().compile_count())

    args = config(**SETTINGS)
    trainer = trained(RewardTrainer(model_folder, args, train_dataset=data["train"], eval_dataset=data["test"]))
    history = trainer.state.log_history
    for name in ("loss", "eval_accuracy", "eval_margin", "eval_min_reward"):
        own = [logs[name] for logs in logged if name in logs]
        assert own == pytest.approx([logs[name] for logs in history if name in logs], abs=1e-6), name
    assert [logs["step"] for logs in logged if "loss" in logs] == list(range(1, 12))
    assert [logs["step"] for logs in logged if "eval_margin" in logs] == [5, 10, 11]
    saved = AutoModelForSequenceClassification.from_pretrained(args.output_dir + "/own")
    assert saved.score.weight.flatten().tolist() == pytest.approx(
        trainer.model.score.weight.detach().cpu().flatten().tolist(), abs=1e-5
    )
    return compiled
