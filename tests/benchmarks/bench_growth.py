"""Time per pair as batches grow, and as the data grows: neither should depend on how much there is.

USE_TORCH_XLA=0 python -m tests.benchmarks.bench_growth

First training on 8 to 256 pairs a batch (plain torch, float32). Then preparing 100,000 pairs: TRL's tokenisation, and
ours with all that packing measures before training, with the peak memory of each in a process of its own.
"""

import os

os.environ["USE_TORCH_XLA"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from datasets import Dataset, disable_progress_bars

from trl_tpu.runtime.native import peak_resident_bytes

from . import bench_time_per_pair as per_pair
from .bench_time_per_pair import real_pairs

RUNS, BATCHES, PAIRS = 3, (8, 16, 32, 64, 128, 256), (25_000, 100_000)


def growing_batches() -> None:
    pairs = real_pairs.best_pairs(2000)
    with tempfile.TemporaryDirectory() as folder:
        model = per_pair.save_model(folder, "64x4", pairs.select(range(400)))
        print(f"\n{'pairs a batch':>14}{'ms a pair':>12}")
        for count in BATCHES:
            steps = max(2, 512 // count)
            runs = [per_pair.train(model, pairs, per_pair.trl_tpu, {}, count, steps)[0] for _ in range(RUNS)]
            print(f"{count:14}{1000 * statistics.median(runs):12.1f}", flush=True)


def prepare(system: str, count: int) -> None:
    """Build a trainer on ``count`` pairs and print seconds and MiB: the whole constructor, and memory at its peak."""
    disable_progress_bars()
    real = real_pairs.best_pairs(2000)
    # no two alike, so that no cache of repeated texts helps
    rows: dict[str, Any] = {
        half: [f"{index} {real[half][index % 2000]}" for index in range(count)] for half in ("chosen", "rejected")
    }
    pairs = Dataset.from_dict(rows)
    del rows
    with tempfile.TemporaryDirectory() as folder:
        model = per_pair.save_model(folder, "64x4", real.select(range(400)))
        package, settings = per_pair.SYSTEMS[system]
        args = package.RewardConfig(folder, bf16=False, report_to="none", disable_tqdm=True, **settings)
        before = peak_resident_bytes()
        start = time.perf_counter()
        trainer = package.RewardTrainer(model, args, train_dataset=pairs)
        if system == "trl_tpu":  # what XLA measures before the first step, though plain torch does not need it
            from trl_tpu.training.planned_shapes import plan_rows_of

            plan_rows_of(trainer.train_dataset, 1024, 64, 8, args)
        seconds = time.perf_counter() - start
    print(seconds, (peak_resident_bytes() - before) / 2**20)


def growing_data() -> None:
    print(f"\n{'pairs prepared':>16}{'TRL s':>10}{'ours s':>10}{'times TRL':>12}{'TRL MiB':>10}{'ours MiB':>10}")
    for count in PAIRS:
        runs: dict[str, list[tuple[float, float]]] = {"TRL 1.16": [], "trl_tpu": []}
        for _ in range(RUNS):
            for system, measured in runs.items():
                command = [sys.executable, "-m", "tests.benchmarks.bench_growth", system, str(count)]
                printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
                measured.append((float(printed[0]), float(printed[1])))
        theirs, ours = runs.values()
        ratio = statistics.median(one[0] / other[0] for one, other in zip(ours, theirs, strict=True))
        (their_time, their_size), (time_, size) = (
            map(statistics.median, zip(*each, strict=True)) for each in (theirs, ours)
        )
        print(f"{count:16}{their_time:10.1f}{time_:10.1f}{ratio:12.2f}{their_size:10.0f}{size:10.0f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        prepare(sys.argv[1], int(sys.argv[2]))
        sys.exit()
    per_pair.torch.set_num_threads(2)
    disable_progress_bars()
    growing_batches()
    growing_data()
