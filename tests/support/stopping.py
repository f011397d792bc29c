"""Shared by the tests that stop training before its end: a trainer, and callbacks that stop it for real."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from training import QUIET
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.training import stopping as preemption

STEPS = 6  # two epochs of three


class At(TrainerCallback):
    """Calls ``act`` once, when ``event`` comes at or after ``step``."""

    def __init__(self, event: str, step: int, act: Callable[[], None]) -> None:
        def handler(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step >= step and not self.done:
                self.done = True
                act()

        self.done = False
        setattr(self, event, handler)


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Callable[[], None]:
    """Something that puts the clock of `preemption` forward."""

    def act() -> None:
        clock = preemption.time.monotonic
        monkeypatch.setattr(preemption.time, "monotonic", lambda: clock() + seconds)

    return act


def make_trainer(model: str, out: Path, *callbacks: TrainerCallback, **settings: Any) -> RewardTrainer:
    """Trains 24 pairs twice in global batches of 8, in float32."""
    from trl_tpu.runtime import current

    each = 8 // current().topology().devices
    sizes = {"per_device_train_batch_size": each, "per_device_eval_batch_size": each, "max_shapes": 1}
    schedule = {"num_train_epochs": 2, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no"}
    args, pairs = RewardConfig(str(out), **QUIET | sizes | schedule | settings), tiny.made_up_pairs(40)
    train, held_out = pairs.select(range(24)), pairs.select(range(24, 40))
    return RewardTrainer(model, args, train_dataset=train, eval_dataset=held_out, callbacks=list(callbacks))
