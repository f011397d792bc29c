"""Time of scoring, against the plain loop: batches of 8 dialogues in the data's order, padded to their longest.

USE_TORCH_XLA=0 python -m tests.benchmarks.bench_score [--models 64x4 256x6] [--data pairs answers]

A model is its hidden size and its number of layers. "pairs" are those of `bench_time_per_pair`, "answers" are 8 to
each long prompt, made from a seed. Plain torch, float32. Both sides tokenize, and load nothing. Runs alternate, each
over the same rows; quote the ratios, from which the machine's own speed cancels out. Rewards are compared, too.

The ratio of tokens that both sides compute is what bounds that of times: kernels of matrix products and attention take
as long for a token on both sides, from 128 tokens a dialogue on also if dialogues are computed one by one.
"""

import os

os.environ["USE_TORCH_XLA"] = "0"  # before transformers is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from datasets import disable_progress_bars
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_tpu
from trl_tpu.scoring.scorer import Scorer

from . import bench_time_per_pair as per_pair

BATCH = 8
RUNS = {"64x4": 5, "256x6": 3}
ROWS = {"pairs": 200, "answers": 4}
PROMPT_WORDS, ANSWER_WORDS, ANSWERS = 800, (20, 60), 8


def pairs(count: int) -> list[dict[str, Any]]:
    return per_pair.real(count).to_list()


def answers(count: int) -> list[dict[str, Any]]:
    """Long prompts with several answers each, of the words of the pairs."""
    words = " ".join(row["chosen"] for row in pairs(400)).split()
    chooser = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(chooser.choice(words, length))

    return [
        {
            "prompt": f"{text(PROMPT_WORDS)}\n\nAssistant:",
            "completions": [f" {text(int(chooser.integers(*ANSWER_WORDS)))}" for _ in range(ANSWERS)],
        }
        for _ in range(count)
    ]


def batches(tokenizer: Any, rows: list[dict[str, Any]]) -> Iterator[Any]:
    """What the plain loop gives the model."""
    dialogues = [
        row.get("prompt", "") + answer + tokenizer.eos_token
        for row in rows
        for answer in row.get("completions") or (row["chosen"], row["rejected"])
    ]
    for first in range(0, len(dialogues), BATCH):
        yield tokenizer(dialogues[first : first + BATCH], padding=True, return_tensors="pt")


def tokens_ratio(scorer: Scorer, rows: list[dict[str, Any]]) -> float:
    """The tokens that we compute, over those that the plain loop computes, padding among them."""
    plain, dialogues = 0, []
    for batch in batches(scorer.tokenizer, rows):
        plain += batch["input_ids"].numel()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            dialogues.append(ids[mask.bool()].numpy())
    parts = (part for _, batch in scorer.batches(dialogues) for part in batch)
    return sum(part.rows.input_ids_RL.numel() for part in parts) / plain


def plain_loop(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[float]:
    rewards: list[float] = []
    with torch.inference_mode():
        for batch in batches(tokenizer, rows):
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            rewards += model(**inputs).logits.squeeze(-1).tolist()
    return rewards


def ours(scorer: Scorer, rows: list[dict[str, Any]]) -> list[float]:
    scored = trl_tpu.score(scorer, rows)
    return [
        reward for row in scored for reward in row.get("rewards") or (row["reward_chosen"], row["reward_rejected"])
    ]


def compare(size: str, data: str) -> None:
    rows = {"pairs": pairs, "answers": answers}[data](ROWS[data])
    with tempfile.TemporaryDirectory() as folder:
        folder = per_pair.save_model(folder, size, per_pair.real(400))
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer, scorer = AutoTokenizer.from_pretrained(folder), Scorer(folder)
    systems = {"plain loop": lambda: plain_loop(model, tokenizer, rows), "trl_tpu": lambda: ours(scorer, rows)}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    rewards: dict[str, list[float]] = {}
    ours(scorer, rows[:8])
    for _ in range(RUNS.get(size, 3)):
        for name, run in systems.items():
            start = time.perf_counter()
            rewards[name] = run()
            seconds[name].append(time.perf_counter() - start)
    ratios = [own / plain for own, plain in zip(seconds["trl_tpu"], seconds["plain loop"], strict=True)]
    plain, own = (statistics.median(times) for times in seconds.values())
    difference = np.abs(np.subtract(rewards["trl_tpu"], rewards["plain loop"])).max()
    print(
        f"{data:8} {size:>7} {len(rows):5} rows: plain loop {plain:6.2f} s, ours {own:6.2f} s, ratio "
        f"{statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f}), of tokens "
        f"{tokens_ratio(scorer, rows):.3f}; rewards differ by {difference:.0e} at most",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(RUNS))
    parser.add_argument("--data", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for size in options.models:
        for kind in options.data:
            compare(size, kind)
