"""Time of scoring, compared with a plain loop over batches of 8 sequences in order, padded to the longest.

python -m tests.benchmarks.bench_score [--models 64x4 256x6] [--data pairs answers] [--runs 3]

A model is given by hidden size and number of layers. "pairs" are those of `bench_time_per_pair`, "answers" are 8 per
long prompt, made up from a seed. Plain torch, float32. Times include tokenization, but not loading. Runs alternate
over the same rows. Quote the ratios: the machine's speed cancels out. Rewards are compared, too.

The ratio of computed tokens bounds the ratio of times: kernels of matrix products and attention take the same time per
token on both sides, also for single sequences of at least 128 tokens.
"""

import tempfile
from typing import Any

import numpy as np
import torch
from real_pairs import best_pairs
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_tpu
from trl_tpu.scoring.scorer import Scorer

from . import harness

BATCH, ROWS = 8, {"pairs": 200, "answers": 4}
PROMPT_WORDS, ANSWER_WORDS, ANSWERS = 800, (20, 60), 8


def answers(count: int) -> list[dict[str, Any]]:
    """Return long prompts with several answers each, made of words of the pairs."""
    words, chooser = " ".join(best_pairs(400)["chosen"]).split(), np.random.default_rng(0)

    def text(length: int) -> str:
        return " " + " ".join(chooser.choice(words, length))

    lengths = chooser.integers(*ANSWER_WORDS, (count, ANSWERS))
    prompts = (f"{text(PROMPT_WORDS)}\n\nAssistant:" for _ in lengths)
    return [{"prompt": next(prompts), "completions": [*map(text, of_prompt)]} for of_prompt in lengths]


def compare(size: str, data: str, runs: int) -> None:
    rows: Any = answers(ROWS[data]) if data == "answers" else best_pairs(ROWS[data]).to_list()
    with tempfile.TemporaryDirectory() as folder:
        folder = harness.save_model(folder, size)
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer, scorer = AutoTokenizer.from_pretrained(folder), Scorer(folder)
    texts = [
        row.get("prompt", "") + answer + tokenizer.eos_token
        for row in rows
        for answer in row.get("completions") or (row["chosen"], row["rejected"])
    ]

    def run(system: str) -> dict[str, Any]:
        seconds, rewards, tokens = list[float](), list[float](), 0
        with harness.timed(seconds), torch.inference_mode():
            if system == "trl_tpu":
                scored = trl_tpu.score(scorer, rows)
                found = (row.get("rewards") or (row["reward_chosen"], row["reward_rejected"]) for row in scored)
                rewards += [reward for each in found for reward in each]
            for first in range(0, len(texts), BATCH) if system == "plain loop" else ():
                batch = texts[first : first + BATCH]
                inputs = tokenizer(batch, padding=True, return_tensors="pt", return_token_type_ids=False)
                rewards += model(**inputs).logits.squeeze(-1).tolist()
                tokens += inputs["input_ids"].numel()
        if system == "trl_tpu":
            parts = scorer.batches([np.array(ids) for ids in tokenizer(texts)["input_ids"]])
            tokens = sum(part.input_ids_RL.numel() for _, batch in parts for part in batch)
        return {"s": seconds[0], "tokens": tokens, "losses": rewards}

    run("trl_tpu")  # warms up
    columns = {"s": ".2f", "tokens": "d"}
    harness.compare_systems(f"{data}, {size}", runs, ("plain loop", "trl_tpu"), run, columns, shares=[*columns])


if __name__ == "__main__":
    options = harness.options(models=["64x4", "256x6"], data=ROWS, runs=3)
    for size in options.models:
        for kind in options.data:
            compare(size, kind, options.runs)
