"""Training time per pair, compared with TRL 1.16 in the same process: plain torch, float32, real pairs.

python -m tests.benchmarks.bench_time_per_pair [--models 64x4 256x6 64x24] [--data real ...] [--pairs 400]

A model is given by hidden size and number of layers, with the architecture of Llama or Qwen3.5.

Runs alternate (TRL, TRL by length, packed, padded, TRL, ...), each an epoch on a new model. The table has medians.
Quote the ratios: the machine's speed cancels out. The pairs come in the same order, so losses per step are compared
with TRL's. Only "by length" has another order: TRL's fastest, which needs a column of lengths.
"""

import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from real_pairs import best_pairs

from . import harness

RUNS = 5
MODELS = {"64x4": RUNS, "256x6": 3, "64x24": 3, "256x6, qwen3_5": 2}  # runs per system
SYSTEMS: dict[str, dict[str, Any]] = {
    harness.TRL: {},
    # unless it keeps all columns, it removes the lengths
    f"{harness.TRL}, by length": {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False},
    "trl_tpu": {},
    "trl_tpu, padded": {"packing": False},
}


def one_length(count: int) -> Dataset:
    """Return random token ids of one length without shared tokens: the worst case for packing."""
    chooser = random.Random(0)
    halves = ("chosen_ids", "rejected_ids")
    return Dataset.from_dict({half: [chooser.choices(range(3, 1000), k=150) for _ in range(count)] for half in halves})


DATA = {"real": best_pairs, "one_length": one_length}


def compare(size: str, data: str, count: int, runs: int, systems: list[str]) -> None:
    pairs, steps = DATA[data](count), count // harness.PAIRS_A_BATCH
    halves = [[*map(len, pairs[half])] for half in pairs.column_names]
    pairs = pairs.add_column("length", [*map(max, *halves)])  # of texts: about proportional to their tokens

    def run(system: str) -> dict[str, Any]:
        trained = harness.train(system, model, pairs, max_steps=steps, **harness.SMALL, **SYSTEMS[system])
        tokens = trained.tokens() / trained.real_tokens()
        return {"ms per pair": 1000 * trained.seconds_per_pair, "tokens": tokens, "losses": trained.losses}

    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_model(folder, size)
        batches = f"{harness.PAIRS_A_BATCH} pairs a batch, {torch.get_num_threads()} threads"
        columns = {"ms per pair": ".1f", "tokens": ".3f"}
        title = f"{data} pairs: model {size}, {batches}"
        harness.compare_systems(title, runs or MODELS.get(size, RUNS), systems, run, columns, shares=["ms per pair"])


if __name__ == "__main__":
    options = harness.options(models=list(MODELS), data=DATA, pairs=400, runs=0, systems=SYSTEMS)
    for size in options.models:
        for kind in options.data:
            compare(size, kind, options.pairs, options.runs, options.systems)
