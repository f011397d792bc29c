"""Subclasses that pass `RewardTrainer`'s constructor by, as libraries do that bring one of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.trainer.reward_trainer import DataCollatorForPreference

#: How a subclass's constructor calls that of transformers.
WAYS: dict[str, Callable[..., None]] = {
    "super(RewardTrainer, self)": lambda self, **given: super(RewardTrainer, self).__init__(**given),
    "transformers.Trainer": lambda self, **given: transformers.Trainer.__init__(self, **given),
}


def losses(way: str, folder: Path) -> tuple[list[float], list[float]]:
    """The losses, in training and evaluation, of a model that is given and of one from `model_init`; and ours."""
    pairs = tiny.made_up_pairs(24)
    tokenizer = tiny.tiny_tokenizer([text for column in ("prompt", "chosen", "rejected") for text in pairs[column]])

    def model() -> Any:
        with torch.random.fork_rng(devices=[]):  # the order of pairs is drawn after it
            torch.manual_seed(0)
            return tiny.tiny_model(tokenizer)

    def run(trainer: Any) -> list[float]:
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*logged, trainer.evaluate()["eval_loss"]]

    args = RewardConfig(
        str(folder), max_steps=3, logging_steps=1, learning_rate=1e-3, report_to="none", save_steps=2, bf16=False
    )

    def whole() -> RewardTrainer:
        return RewardTrainer(model(), args, train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer)

    prepared = whole()
    own = type("Own", (RewardTrainer,), {"__init__": WAYS[way]})
    given = {
        "args": args,
        "data_collator": DataCollatorForPreference(prepared.processing_class.pad_token_id),
        "train_dataset": prepared.train_dataset,
        "eval_dataset": prepared.eval_dataset,
        "processing_class": tokenizer,
    }
    found = [*run(own(model=model(), **given)), *run(own(model_init=model, **given))]
    return found, run(whole()) * 2
