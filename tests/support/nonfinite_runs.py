"""Runs on data in which some pairs have a token with a NaN embedding: only their steps are nonfinite."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from training import QUIET, differing, trained

BATCH = 8
POISON = "~"


def save_model(folder: Path) -> str:
    """Save a tiny model and its tokenizer; the embedding of the poison token is NaN."""
    tokenizer = tiny.tiny_tokenizer([*tiny.made_up_pairs(200)["chosen"]])
    model = tiny.tiny_model(tokenizer)
    (token,) = tokenizer.encode(POISON)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pairs_of(steps: int, poisoned: Sequence[int] = (), left_out: Sequence[int] = (), accumulation: int = 1) -> Dataset:
    """Return the pairs of ``steps`` steps, in order; the fourth pair of a poisoned step has the poison token."""
    rows: list[dict[str, Any]] = list(tiny.made_up_pairs(steps * accumulation * BATCH))  # type: ignore[arg-type]
    batch = accumulation * BATCH
    for step in poisoned:
        rows[step * batch + 3]["chosen"] += POISON
    kept = [rows[row] for row in range(len(rows)) if row // batch not in left_out]
    return Dataset.from_list(kept)


def train(*args: Any, **settings: Any) -> Any:
    """Train a trainer built by `make` and return it."""
    return trained(make(*args, **settings))


def make(
    model: str,
    out: Path,
    bad: Any,
    steps: int,
    left_out: Any = (),
    callbacks: Any = (),
    dataset: Any = None,
    **more: Any,
) -> Any:
    """Build a trainer on the pairs of these steps, in order, at a constant learning rate."""
    from trl_tpu import RewardConfig, RewardTrainer
    from trl_tpu.runtime import current

    taken = steps - len(left_out)
    defaults = QUIET | {"max_steps": taken, "logging_steps": taken, "save_strategy": "no"}
    defaults |= {"per_device_train_batch_size": BATCH // current().topology().devices, "max_shapes": 1}
    defaults |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    args = RewardConfig(str(out), **defaults | more)
    accumulation = args.gradient_accumulation_steps
    data = pairs_of(steps, bad, left_out, accumulation) if dataset is None else dataset
    return RewardTrainer(model, args, train_dataset=data, callbacks=list(callbacks))


def check_skipped(skipped: Any, without: Any, steps: int) -> None:
    """Check that a run that skipped steps is bitwise equal to one without them, and counts and logs equally."""
    assert differing(skipped, without) == []
    assert (logged(skipped, "nonfinite"), logged(without, "nonfinite")) == ([steps], [0])
    for name in ("loss", "train_loss", "grad_norm"):
        assert logged(skipped, name) == logged(without, name)
    for name in ("accuracy", "margin", "mean_reward", "min_reward", "max_reward"):
        assert math.isfinite(*logged(skipped, name))


def logged(trainer: Any, name: str) -> list[float]:
    return [logs[name] for logs in trainer.state.log_history if name in logs]
