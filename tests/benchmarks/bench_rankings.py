"""Rankings beside the same comparisons as pairs, which TRL 1.16 takes: 8 answers to a long prompt, in plain torch.

USE_TORCH_XLA=0 python -m tests.benchmarks.bench_rankings [--model 128x4] [--runs 3] [--steps 4]

Systems alternate, each on a fresh model, in float32, and a batch is the same comparisons for all: two prompts, or
their 56 pairs. So losses are the same, too. Quote the ratios. "Planned" rows have shapes as on TPUs, with padding.
"""

import os

os.environ["USE_TORCH_XLA"] = "0"  # before transformers is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import random
import statistics
import tempfile
from itertools import islice, permutations
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars

import trl_tpu
from trl_tpu.runtime import Runtime, replace

from . import bench_time_per_pair as per_pair
from .bench_real_model import tokens_in

PROMPT, ANSWER, ANSWERS, PROMPTS_A_BATCH = 512, (24, 40), 8, 2  # tokens; those of an answer are about 32
COMPARISONS = ANSWERS * (ANSWERS - 1) // 2  # of a prompt
MOST_TOKENS, MOST_TIME = 1.1, 1 / 15  # that rankings are to take, of the unique tokens and of TRL's time


class Planning(Runtime):
    """Plain torch that wants planned shapes, as a TPU does."""

    plans_shapes = True


SYSTEMS: dict[str, tuple[Any, dict[str, Any], type[Runtime]]] = {
    "TRL 1.16, pairs": (trl, {"use_cpu": True}, Runtime),
    "rankings": (trl_tpu, {}, Runtime),
    "rankings, planned": (trl_tpu, {}, Planning),
}


def rankings(count: int) -> Dataset:
    """Token ids at random, with a full order of each prompt's answers."""
    chooser = random.Random(0)

    def ids(length: int) -> list[int]:
        return [chooser.randrange(3, 1000) for _ in range(length)]

    prompts = [ids(PROMPT) for _ in range(count)]
    answers = [[prompt + ids(chooser.randint(*ANSWER)) for _ in range(ANSWERS)] for prompt in prompts]
    grades = [chooser.sample(range(ANSWERS), ANSWERS) for _ in prompts]
    return Dataset.from_dict({"answer_ids": answers, "grades": grades})


def as_pairs(ranked: Dataset) -> Dataset:
    """Every comparison a pair, those of a prompt one after another."""
    pairs = [
        {"chosen_ids": better, "rejected_ids": worse}
        for row in ranked
        for (better, high), (worse, low) in permutations(zip(row["answer_ids"], row["grades"], strict=True), 2)
        if high > low
    ]
    return Dataset.from_list(pairs)


def compare(size: str, runs: int, steps: int) -> None:
    ranked = rankings(PROMPTS_A_BATCH * steps)
    unique = sum(PROMPT + sum(len(ids) - PROMPT for ids in row["answer_ids"]) for row in ranked)
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    losses: dict[str, list[float]] = {}
    tokens: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = per_pair.save_model(folder, size, per_pair.real(400))
        for _ in range(runs):
            for name, (package, settings, runtime) in SYSTEMS.items():
                replace(runtime())
                rows, count = (ranked, 1) if name.startswith("rankings") else (as_pairs(ranked), COMPARISONS)
                in_order = settings | {"train_sampling_strategy": "sequential"}
                each, losses[name], trainer = per_pair.train(
                    model, rows, package, in_order, PROMPTS_A_BATCH * count, steps
                )
                seconds[name].append(each * count / COMPARISONS)
                tokens[name] = tokens_in(islice(trainer.get_train_dataloader(), steps)) / unique
    theirs, reference = seconds[next(iter(SYSTEMS))], losses[next(iter(SYSTEMS))]
    batch = PROMPTS_A_BATCH * COMPARISONS
    print(f"\n{ANSWERS} answers to a prompt of {PROMPT} tokens: model {size}, {steps} steps of {batch} comparisons")
    print(f"{'':18}{'ms a comparison':>17}{'times TRL':>12}{'tokens a unique one':>21}{'largest difference':>20}")
    for name, times in seconds.items():
        ratio = statistics.median(ours / other for ours, other in zip(times, theirs, strict=True))
        difference = max(abs(a - b) for a, b in zip(losses[name], reference, strict=True))
        print(f"{name:18}{1000 * statistics.median(times):17.2f}{ratio:12.4f}{tokens[name]:21.3f}{difference:20.1e}")
        if name.startswith("rankings"):
            assert tokens[name] <= MOST_TOKENS, f"more than {MOST_TOKENS} tokens for a unique one"
    print(f"Rankings are to take at most {MOST_TOKENS} tokens a unique one, and {MOST_TIME:.4f} of TRL's time.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="128x4")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(2)
    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    compare(options.model, options.runs, options.steps)
