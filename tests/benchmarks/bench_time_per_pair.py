"""Time per pair of training, against TRL 1.16 in the same process: plain torch, float32, real pairs.

USE_TORCH_XLA=0 python -m tests.benchmarks.bench_time_per_pair [HIDDEN ...]

Runs alternate (TRL, padded, packed, TRL, ...), each on a fresh model and the same pairs in the same order, and the
table shows medians. Quote the ratios: the machine's own speed cancels out of them. Losses stand beside each other.
"""

import os

os.environ["USE_TORCH_XLA"] = "0"  # before transformers is imported

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl

import trl_tpu

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny  # noqa: E402

RUNS, STEPS, PAIRS_A_BATCH, LAYERS = 5, 12, 8, {64: 4, 256: 6}
SYSTEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "TRL 1.16": (trl, {"optim": "adamw_torch", "use_cpu": True}),
    "trl_tpu": (trl_tpu, {}),
    "trl_tpu, packed": (trl_tpu, {"packing": True}),
}


def train(model: str, pairs: Any, package: Any, settings: dict[str, Any]) -> tuple[float, float]:
    """Seconds per pair of the training loop, and the mean loss."""
    with tempfile.TemporaryDirectory() as folder:
        args = package.RewardConfig(
            folder,
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=PAIRS_A_BATCH,
            gradient_checkpointing=False,
            logging_steps=STEPS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        trainer = package.RewardTrainer(model, args, train_dataset=pairs)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seconds / (STEPS * PAIRS_A_BATCH), losses[0]


def compare(hidden: int) -> None:
    pairs = tiny.hh_pairs(0, 400)
    with tempfile.TemporaryDirectory() as folder:
        texts = [*pairs["chosen"], *pairs["rejected"]]
        model = tiny.save_tiny(Path(folder), texts, hidden=hidden, layers=LAYERS.get(hidden, 4))
        seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        losses = {}
        for _ in range(RUNS):
            for name, (package, settings) in SYSTEMS.items():
                each, losses[name] = train(model, pairs, package, settings)
                seconds[name].append(each)
    layers, threads = LAYERS.get(hidden, 4), torch.get_num_threads()
    print(f"\nhidden {hidden}, {layers} layers, {PAIRS_A_BATCH} pairs a batch, {threads} threads")
    print(f"{'':18}{'ms a pair':>12}{'times TRL':>12}{'loss':>14}")
    for name in SYSTEMS:
        ratios = [ours / reference for ours, reference in zip(seconds[name], seconds["TRL 1.16"], strict=True)]
        median = 1000 * statistics.median(seconds[name])
        print(f"{name:18}{median:12.1f}{statistics.median(ratios):12.3f}{losses[name]:14.6f}")


if __name__ == "__main__":
    if not tiny.HH_FILE.exists():
        sys.exit(f"The real preference pairs are not at {tiny.HH_FILE}: nothing to measure.")
    torch.set_num_threads(2)
    for size in map(int, sys.argv[1:] or LAYERS):
        compare(size)
