"""Compare the loop of `examples/own_loop.py` with `RewardTrainer` in this process, on all devices or as a rank."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from environment import EXAMPLES
from safetensors.torch import load_file
from training import logged, trained, untimed

from trl_tpu import RewardTrainer, TrainState
from trl_tpu.runtime import current

#: Two epochs with a short last batch.
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
    """Compare logs and saved weights of the loop with the trainer's; return the number of programs at each log.

    The tolerance is 1e-6: on XLA their steps are different programs, which may sum in another order. The learning rate
    is small, since Adam turns rounding of gradients near 0 into full steps.
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
    if args.process_index:  # only the first process saves
        return compiled
    weights, others = (load_file(folder / name / "model.safetensors") for name in ("own", "trainer"))
    assert weights.keys() == others.keys()
    assert max((weights[name] - others[name]).abs().max().item() for name in others) <= 1e-6
    return compiled
