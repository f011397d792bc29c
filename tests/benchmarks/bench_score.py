"""Time of scoring, compared with a plain loop over batches of 8 sequences in order, padded to the longest.

python -m tests.benchmarks.bench_score [--models 64x4 256x6] [--data pairs answers]

A model is given by hidden size and number of layers. "pairs" are those of `bench_time_per_pair`, "answers" are 8 per
long prompt, made up from a seed. Plain torch, float32. Times include tokenization, but not loading. Runs alternate
over the same rows. Quote the ratios: the machine's speed cancels out. Rewards are compared, too.

The ratio of computed tokens bounds the ratio of times: kernels of matrix products and attention take the same time per
token on both sides, also for single sequences of at least 128 tokens.
"""

import statistics
import tempfile
from typing import Any

import numpy as np
import torch
from real_pairs import best_pairs
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_tpu
from trl_tpu.scoring.scorer import Scorer

from . import harness

BATCH = 8
RUNS = {"64x4": 5, "256x6": 3}
ROWS = {"pairs": 200, "answers": 4}
PROMPT_WORDS, ANSWER_WORDS, ANSWERS = 800, (20, 60), 8


def pairs(count: int) -> list[dict[str, Any]]:
    return best_pairs(count).to_list()


def answers(count: int) -> list[dict[str, Any]]:
    """Return long prompts with several answers each, made of words of the pairs."""
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


DATA = {"pairs": pairs, "answers": answers}


def dialogues(tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Yield the batches of the plain loop."""
    texts = [
        row.get("prompt", "") + answer + tokenizer.eos_token
        for row in rows
        for answer in row.get("completions") or (row["chosen"], row["rejected"])
    ]
    return [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]


def plain_loop(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[float]:
    rewards: list[float] = []
    with torch.inference_mode():
        for batch in dialogues(tokenizer, rows):
            inputs = tokenizer(batch, padding=True, return_tensors="pt", return_token_type_ids=False)
            rewards += model(**inputs).logits.squeeze(-1).tolist()
    return rewards


def tokens_ratio(scorer: Scorer, rows: list[dict[str, Any]]) -> float:
    """Return our number of computed tokens, padding included, relative to that of the plain loop."""
    ids = [scorer.tokenizer(batch)["input_ids"] for batch in dialogues(scorer.tokenizer, rows)]
    plain = sum(len(batch) * max(map(len, batch)) for batch in ids)
    parts = (part for _, batch in scorer.batches([np.array(row) for batch in ids for row in batch]) for part in batch)
    return sum(part.input_ids_RL.numel() for part in parts) / plain


def ours(scorer: Scorer, rows: list[dict[str, Any]]) -> list[float]:
    scored = trl_tpu.score(scorer, rows)
    return [each for row in scored for each in row.get("rewards") or (row["reward_chosen"], row["reward_rejected"])]


def compare(size: str, data: str) -> None:
    rows = DATA[data](ROWS[data])
    with tempfile.TemporaryDirectory() as folder:
        folder = harness.save_model(folder, size)
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer, scorer = AutoTokenizer.from_pretrained(folder), Scorer(folder)
    systems = {"plain loop": lambda: plain_loop(model, tokenizer, rows), "trl_tpu": lambda: ours(scorer, rows)}

    def run(system: str) -> dict[str, Any]:
        seconds: list[float] = []
        with harness.timed(seconds):
            rewards = systems[system]()
        return {"s": seconds[0], "rewards": rewards}

    ours(scorer, rows[:8])
    plain, own = harness.alternate(RUNS.get(size, 3), systems, run).values()
    ratios = harness.ratios(own, plain, "s")
    difference = np.abs(np.subtract(own[0]["rewards"], plain[0]["rewards"])).max()
    print(
        f"{data:8} {size:>7} {len(rows):5} rows: plain loop {harness.median(plain, 's'):6.2f} s, "
        f"ours {harness.median(own, 's'):6.2f} s, ratio {statistics.median(ratios):.3f} (from {min(ratios):.3f} to "
        f"{max(ratios):.3f}), of tokens {tokens_ratio(scorer, rows):.3f}; rewards differ by {difference:.0e} at most",
        flush=True,
    )


if __name__ == "__main__":
    options = harness.options(models=list(RUNS), data=DATA)
    for size in options.models:
        for kind in options.data:
            compare(size, kind)
