"""Training time per pair, compared with TRL 1.16 in the same process: plain torch, float32, real pairs.

python -m tests.benchmarks.bench_time_per_pair [--models 64x4 256x6 64x24] [--data real ...]

A model is given by hidden size and number of layers, with the architecture of Llama or Qwen3.5.

Runs alternate (TRL, packed, padded, TRL, ...), each on a new model and the same pairs in the same order. The table has
medians. Quote the ratios: the machine's speed cancels out. Losses per step are compared with TRL's.
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
MODELS = {"64x4": RUNS, "256x6": 3, "64x24": 3, "256x6, qwen3_5": 2}  # runs per system
SYSTEMS: dict[str, dict[str, Any]] = {harness.TRL: {}, "trl_tpu": {}, "trl_tpu, padded": {"packing": False}}


def unshared(count: int) -> Dataset:
    """Return the same sequences, each chosen one paired with another pair's rejected one: no shared tokens."""
    pairs = best_pairs(count)
    rejected = list(pairs["rejected"])
    random.Random(0).shuffle(rejected)
    return Dataset.from_dict({"chosen": pairs["chosen"], "rejected": rejected})


def one_length(count: int) -> Dataset:
    """Return random token ids of one length without shared tokens: the worst case for packing."""
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
        return {"ms per pair": 1000 * trained.seconds_per_pair, "mean loss": statistics.mean(losses), "losses": losses}

    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_model(folder, size)
        batches = f"{harness.PAIRS_A_BATCH} pairs a batch, {torch.get_num_threads()} threads"
        title, columns = f"{data} pairs: model {size}, {batches}", {"ms per pair": ".1f", "mean loss": ".6f"}
        harness.compare_with_trl(title, MODELS.get(size, RUNS), SYSTEMS, run, columns, shares=["ms per pair"])


if __name__ == "__main__":
    options = harness.options(models=list(MODELS), data=DATA)
    for size in options.models:
        for kind in options.data:
            compare(size, kind)
