"""Time per pair of training, against TRL 1.16 in the same process: plain torch, float32, real pairs.

USE_TORCH_XLA=0 python -m tests.benchmarks.bench_time_per_pair [--models 64x4 256x6 64x24] [--data real ...]

A model is its hidden size and its number of layers.

Runs alternate (TRL, packed, padded, TRL, ...), each on a fresh model and the same pairs in the same order, and the
table shows medians. Quote the ratios: the machine's own speed cancels out of them. Per-step losses stand beside TRL's.
"""

import os

os.environ["USE_TORCH_XLA"] = "0"  # before transformers is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars

import trl_tpu

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import real_pairs  # noqa: E402
import tiny  # noqa: E402

RUNS, STEPS, PAIRS_A_BATCH, HEADS = 5, 24, 8, 8
MODELS = {"64x4": RUNS, "256x6": 3, "64x24": 3}  # runs of each system
SYSTEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "TRL 1.16": (trl, {"use_cpu": True}),
    "trl_tpu": (trl_tpu, {}),
    "trl_tpu, padded": (trl_tpu, {"packing": False}),
}


def real(count: int) -> Dataset:
    """The first pairs of the data, as they are; of the same lengths, made up, where they are not there."""
    return real_pairs.best_pairs(count)


def unshared(count: int) -> Dataset:
    """The same dialogues, each chosen one beside the rejected one of another pair: nothing to share."""
    pairs = real(count)
    rejected = list(pairs["rejected"])
    random.Random(0).shuffle(rejected)
    return Dataset.from_dict({"chosen": pairs["chosen"], "rejected": rejected})


def one_length(count: int) -> Dataset:
    """Token ids at random, all dialogues equally long, nothing shared: the least that packing can do."""
    chooser = random.Random(0)
    rows = [
        {half: [chooser.randrange(3, 1000) for _ in range(150)] for half in ("chosen_ids", "rejected_ids")}
        for _ in range(count)
    ]
    return Dataset.from_list(rows)


DATA = {"real": real, "unshared": unshared, "one_length": one_length}


def train(
    model: str,
    pairs: Any,
    package: Any,
    settings: dict[str, Any],
    pairs_a_batch: int = PAIRS_A_BATCH,
    steps: int = STEPS,
) -> tuple[float, list[float], Any]:
    """Seconds per pair of the training loop, the loss of each step, and the trainer."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        args = package.RewardConfig(
            folder,
            bf16=False,
            max_steps=steps,
            per_device_train_batch_size=pairs_a_batch,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            optim="adamw_torch_fused",  # TRL's default
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        trainer = package.RewardTrainer(model, args, train_dataset=pairs)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seconds / (steps * pairs_a_batch), losses, trainer


def save_model(folder: str, size: str, pairs: Dataset) -> str:
    texts = [*pairs["chosen"], *pairs["rejected"]]
    hidden, layers = map(int, size.split("x"))
    return tiny.save_tiny(Path(folder), texts, hidden, layers, num_attention_heads=HEADS, num_key_value_heads=HEADS)


def compare(size: str, data: str) -> None:
    pairs = DATA[data](400)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(folder, size, real(400))
        seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        losses: dict[str, list[float]] = {}
        for _ in range(MODELS.get(size, RUNS)):
            for name, (package, settings) in SYSTEMS.items():
                each, losses[name], _ = train(model, pairs, package, settings)
                seconds[name].append(each)
    threads = torch.get_num_threads()
    print(f"\n{data} pairs: model {size}, {PAIRS_A_BATCH} pairs a batch, {threads} threads")
    print(f"{'':18}{'ms a pair':>12}{'times TRL':>12}{'1 / that':>10}{'mean loss':>12}{'largest difference':>20}")
    reference = seconds["TRL 1.16"]
    for name in SYSTEMS:
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds[name], reference, strict=True))
        median = 1000 * statistics.median(seconds[name])
        differences = (abs(a - b) for a, b in zip(losses[name], losses["TRL 1.16"], strict=True))
        loss = statistics.mean(losses[name])
        print(f"{name:18}{median:12.1f}{ratio:12.3f}{1 / ratio:10.2f}{loss:12.6f}{max(differences):20.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    options = parser.parse_args()
    torch.set_num_threads(2)
    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for size in options.models:
        for kind in options.data:
            compare(size, kind)
