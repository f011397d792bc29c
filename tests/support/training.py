"""Train, stop training before its end, and return what trainers log in a form that tests can compare.

Imports of trainers are inside functions: they choose a device, and some scripts have to set the rank first.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

if TYPE_CHECKING:
    import pytest


#: Settings of most runs: float32, nothing printed or tracked.
QUIET: dict[str, Any] = {"bf16": False, "report_to": "none", "disable_tqdm": True}
_TIMED = ("_runtime", "_per_second", "seconds_per_step", "mfu", "memory_gib", "compiled_programs")


def trained(trainer: Any, resume: str | bool | None = None) -> Any:
    """Train a trainer, resuming from a checkpoint if one is given, and return it."""
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def untimed(logs: dict[str, Any]) -> dict[str, Any]:
    """Drop times, memory and counts of the process: they differ between runs."""
    return {key: value for key, value in logs.items() if not key.endswith(_TIMED)}


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return the logs of training and evaluation without times, by step, training first."""
    logs = [untimed(log) for log in trainer.state.log_history if "train_loss" not in log]
    return sorted(logs, key=lambda log: (log["step"], "eval_loss" in log))


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's tensors on the host."""
    from trl_tpu.checkpoint.state_dict import to_host  # imports the trainer

    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    tensors = dict(trainer.model.state_dict())
    for parameter, values in optimizer.state.items():
        for kind, value in values.items():
            tensors[f"{names[parameter]} {kind}"] = torch.as_tensor(value if value is not None else -1.0)
    return to_host(tensors, trainer.trl_tpu.runtime)


def differing(first: Any, second: Any) -> list[str]:
    """Return the names of weights and optimizer state that are not bitwise equal in two trainers."""
    state, other_state = state_of(first), state_of(second)
    assert state.keys() == other_state.keys()
    return [name for name in state if not torch.equal(state[name].nan_to_num(7.0), other_state[name].nan_to_num(7.0))]


# ---- training that stops before its end

STEPS = 6  # two epochs of three steps


class At(TrainerCallback):
    """Calls ``act`` once, at the first ``event`` at or after ``step``."""

    def __init__(self, event: str, step: int, act: Callable[[], None]) -> None:
        def handler(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step >= step and not self.done:
                self.done = True
                act()

        self.done = False
        setattr(self, event, handler)


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def advance_clock(monkeypatch: "pytest.MonkeyPatch", seconds: float) -> Callable[[], None]:
    """Return a function that advances the clock of `trl_tpu.training.stopping`."""
    from trl_tpu.training import stopping

    def act() -> None:
        clock = stopping.time.monotonic
        monkeypatch.setattr(stopping.time, "monotonic", lambda: clock() + seconds)

    return act


def make_trainer(model: str, out: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    """Return a trainer for two epochs of 24 pairs in global batches of 8, in float32."""
    import tiny

    from trl_tpu import RewardConfig, RewardTrainer
    from trl_tpu.runtime import current

    pairs_per_device = 8 // current().topology().devices
    sizes = {"per_device_train_batch_size": pairs_per_device, "per_device_eval_batch_size": pairs_per_device}
    sizes |= {"num_train_epochs": 2, "max_shapes": 1}
    schedule = {"learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no"}
    args, pairs = RewardConfig(str(out), **QUIET | sizes | schedule | settings), tiny.made_up_pairs(40)
    train, held_out = pairs.select(range(24)), pairs.select(range(24, 40))
    return RewardTrainer(model, args, train_dataset=train, eval_dataset=held_out, callbacks=list(callbacks))
