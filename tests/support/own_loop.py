"""Runs the loop of `examples/own_loop.py` beside `RewardTrainer`, in this process: on all devices, and in ranks."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from places import EXAMPLES
from safetensors.torch import load_file
from training import logged, trained, untimed

from trl_tpu import RewardTrainer, TrainState
from trl_tpu.runtime import current

#: Two passes, whose last batch is short.
SETTINGS: dict[str, Any] = {
    **{"max_steps": 11, "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 5},
    **{"center_rewards_coefficient": 0.01, "max_shapes": 2, "learning_rate": 3e-4},
}


def example() -> Any:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("own_loop_example", EXAMPLES / "own_loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(config: Callable[..., Any], model_folder: str, folder: Path, **settings: Any) -> list[int]:
    """Hold what the loop logs and saves against the trainer; return how many programs there were at each log.

    Tolerance 1e-6: on XLA their steps are other programs, which may add up in another order. The rate is small, since
    Adam makes whole steps of the rounding in gradients near 0.
    """
    data: dict[str, Any] = {"train_dataset": tiny.uneven_pairs(45, margin=True)}
    data["eval_dataset"] = tiny.uneven_pairs(21, seed=1)
    logs, compiled = list[dict[str, Any]](), []
    args = config(**SETTINGS | settings, output_dir=str(folder / "own"))
    for each in example().train(TrainState(model_folder, args, **data)):
        logs.append(untimed(each))
        compiled.append(current().compile_count())
    args = config(**SETTINGS | settings, output_dir=str(folder / "trainer"))
    trainer = trained(RewardTrainer(model_folder, args, **data))
    trainer.save_model()
    expected = logged(trainer)
    assert [{*each} for each in logs] == [{*each} - {"epoch"} for each in expected]
    for own, reference in zip(logs, expected, strict=True):
        assert own == pytest.approx({name: reference[name] for name in own}, abs=1e-6)
    if args.process_index:  # the first process saves, and the others need not wait for it
        return compiled
    weights, others = (load_file(folder / name / "model.safetensors") for name in ("own", "trainer"))
    assert weights.keys() == others.keys()
    assert max((weights[name] - others[name]).abs().max().item() for name in others) <= 1e-6
    return compiled
