"""Hyperparameter search through transformers' optuna backend, without optuna."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from accelerate.utils.memory import release_memory
from training import QUIET, trained
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS, OptunaBackend
from transformers.trainer_utils import BestRun, HPSearchBackend

from trl_tpu import RewardConfig, RewardTrainer

TRIALS: list[dict[str, Any]] = [
    {"learning_rate": 1e-2},
    {"learning_rate": 1e-3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
]


class Backend(OptunaBackend):
    """Replaces transformers' optuna backend and runs the trials above."""

    @staticmethod
    def is_available() -> bool:
        return True

    def run(self, trainer: Any, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
        found = []
        for number in range(n_trials):
            trainer.train(trial=SimpleNamespace(number=number, params=TRIALS[number]))
            found.append(trainer.compute_objective(trainer.evaluate()))
            trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
            trainer.accelerator.clear()
        return BestRun("all", found, {})  # type: ignore[arg-type]  # a list, as for several objectives


def losses(folder: Path, monkeypatch: pytest.MonkeyPatch, afterwards: bool) -> tuple[list[float], list[float]]:
    """Return the evaluation loss of each trial of a search, and of separate runs with the trials' arguments.

    Args:
        afterwards: Set `model_init` after the trainer is created.
    """
    # the original detects the library of a trial
    monkeypatch.setattr(transformers.integrations, "hp_params", lambda trial: trial.params)
    monkeypatch.setitem(ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.OPTUNA, Backend)
    pairs = tiny.made_up_pairs(24)
    tokenizer = tiny.tiny_tokenizer(pairs)

    def model() -> Any:
        with torch.random.fork_rng(devices=[]):  # keeps the random state, which decides the order of pairs
            torch.manual_seed(0)
            return tiny.tiny_model(tokenizer)

    def make(place: str, given: dict[str, Any], **more: Any) -> RewardTrainer:
        settings = QUIET | {"max_steps": 2, "save_steps": 1, "max_shapes": 1} | more
        args = RewardConfig(str(folder / place), **settings)
        return RewardTrainer(args=args, train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer, **given)

    alone = []
    for number, trial in enumerate(TRIALS):
        trainer = trained(make(f"alone-{number}", {"model_init": model}, **trial))
        alone.append(trainer.evaluate()["eval_loss"])
    trainer = make("search", {"model": model()} if afterwards else {"model_init": model})
    if afterwards:
        trainer.model_init = model
    best: Any = trainer.hyperparameter_search(
        lambda trial: trial.params, lambda metrics: metrics["eval_loss"], n_trials=len(TRIALS), backend="optuna"
    )
    assert (folder / "search" / "run-1" / "checkpoint-2" / "model.safetensors").is_file()
    return best.objective, alone
