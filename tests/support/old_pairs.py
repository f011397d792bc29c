"""What the tests of the old API share: an old script's model and data, and reference numbers.

The reference is the Hugging Face model itself, called on one dialogue at a time, without padding.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import tiny
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from trl_tpu import RewardConfig, RewardTrainer

HALVES = ("chosen", "rejected")
LEARNING_RATE = 1e-2


class Old(NamedTuple):
    """What an old script has in its hands before it makes a trainer."""

    model: LlamaForSequenceClassification
    tokenizer: PreTrainedTokenizerFast
    raw: Dataset
    pairs: Dataset


def old_columns(raw: Dataset, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """The preprocessing function of TRL's old examples."""

    def preprocess(row: dict[str, Any]) -> dict[str, list[int]]:
        halves = {half: tokenizer(row[half]) for half in HALVES}
        return {f"{key}_{half}": halves[half][key] for half in HALVES for key in ("input_ids", "attention_mask")}

    return raw.map(preprocess)


def make_old() -> Old:
    """12 pairs with margins, a tiny model and its tokenizer."""
    pairs = tiny.made_up_pairs(12, margin=True)
    raw = pairs.map(lambda row: {half: row["prompt"] + row[half] for half in HALVES}, remove_columns="prompt")
    tokenizer = tiny.tiny_tokenizer([*raw["chosen"], *raw["rejected"]], vocab_size=400)
    return Old(tiny.tiny_model(tokenizer), tokenizer, raw, old_columns(raw, tokenizer))


def config(folder: Path, **settings: Any) -> RewardConfig:
    quiet = {"bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return RewardConfig(str(folder), **(quiet | settings))


def full_batch_config(folder: Path, **settings: Any) -> RewardConfig:
    """For training as `losses_of_hand_made_loop` does."""
    whole = {"per_device_train_batch_size": 12, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant"}
    return config(folder, **(whole | settings))


def rewards_alone(model: LlamaForSequenceClassification, pairs: Dataset) -> torch.Tensor:
    """Rewards [N, 2] in float64, each dialogue in a forward of its own."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        rewards = [[exact(torch.tensor([row[f"input_ids_{half}"]])).logits.item() for half in HALVES] for row in pairs]
    return torch.tensor(rewards, dtype=torch.float64)


def mean_loss(rewards_N2: torch.Tensor, margin_N: Any = 0.0) -> float:
    return -logsigmoid(rewards_N2[:, 0] - rewards_N2[:, 1] - torch.as_tensor(margin_N)).mean().item()


def losses_of_hand_made_loop(old: Old, steps: int) -> list[float]:
    """Full-batch AdamW with gradient clipping, two forwards a pair, no trainer and no padding."""
    model = copy.deepcopy(old.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        pair_losses = []
        for row in old.pairs:
            chosen, rejected = (model(torch.tensor([row[f"input_ids_{half}"]])).logits.squeeze() for half in HALVES)
            pair_losses.append(-logsigmoid(chosen - rejected - row["margin"]))
        loss = torch.stack(pair_losses).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def logged(trainer: RewardTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]
