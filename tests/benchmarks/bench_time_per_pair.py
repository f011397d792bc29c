"""Time per pair of training, against TRL 1.16 in the same process: plain torch, float32, real pairs.

python -m tests.benchmarks.bench_time_per_pair [--models 64x4 256x6 64x24] [--data real ...]

A model is its hidden size and its number of layers, of Llama's form or of Qwen3.5's.

Runs alternate (TRL, packed, padded, TRL, ...), each on a fresh model and the same pairs in the same order, and the
table shows medians. Quote the ratios: the machine's own speed cancels out of them. Per-step losses stand beside TRL's.
"""

import random
import statistics
import tempfile
from typing import Any

import torch
from datasets import Dataset
from real_pairs import best_pairs

from . import harness

RUNS, STEPS = 5, 24
MODELS = {"64x4": RUNS, "256x6": 3, "64x24": 3, "256x6, qwen3_5": 2}  # runs of each system
SYSTEMS: dict[str, dict[str, Any]] = {harness.TRL: {}, "trl_tpu": {}, "trl_tpu, padded": {"packing": False}}


def unshared(count: int) -> Dataset:
    """The same dialogues, each chosen one beside the rejected one of another pair: nothing to share."""
    pairs = best_pairs(count)
    rejected = list(pairs["rejected"])
    random.Random(0).shuffle(rejected)
    return Dataset.from_dict({"chosen": pairs["chosen"], "rejected": rejected})


def one_length(count: int) -> Dataset:
    """Token ids at random, all dialogues equally long, nothing shared: the least that packing can do."""
    chooser = random.Random(0)
    halves = ("chosen_ids", "rejected_ids")
    return Dataset.from_list(
        [{half: [chooser.randrange(3, 1000) for _ in range(150)] for half in halves} for _ in range(count)]
    )


DATA = {"real": best_pairs, "unshared": unshared, "one_length": one_length}


def compare(size: str, data: str) -> None:
    pairs = DATA[data](400)

    def run(system: str) -> dict[str, Any]:
        trained = harness.train(system, model, pairs, max_steps=STEPS, **harness.SMALL, **SYSTEMS[system])
        losses = trained.losses
        return {"ms a pair": 1000 * trained.seconds_a_pair, "mean loss": statistics.mean(losses), "losses": losses}

    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_model(folder, size)
        measured = harness.alternate(MODELS.get(size, RUNS), SYSTEMS, run)
    harness.show_beside_trl(
        f"{data} pairs: model {size}, {harness.PAIRS_A_BATCH} pairs a batch, {torch.get_num_threads()} threads",
        {"ms a pair": ".1f", "mean loss": ".6f"},
        measured,
        shares=["ms a pair"],
    )


if __name__ == "__main__":
    options = harness.options(models=list(MODELS), data=DATA)
    for size in options.models:
        for kind in options.data:
            compare(size, kind)
