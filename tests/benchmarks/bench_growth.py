"""Time per pair as batches grow, and as the data grows: neither should depend on how much there is.

python -m tests.benchmarks.bench_growth [--runs 3] [--batches 8 16 ...] [--counts 25000 100000]

First training on 8 to 256 pairs a batch (plain torch, float32). Then preparing 100,000 pairs: TRL's tokenisation, and
ours with all that packing measures before training, with the peak memory of each in a process of its own.
"""

import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from datasets import Dataset
from real_pairs import best_pairs

from trl_tpu.runtime.native import peak_resident_bytes
from trl_tpu.training.planned_shapes import plan_rows_of

from . import harness

RUNS, BATCHES, PAIRS = 3, (8, 16, 32, 64, 128, 256), (25_000, 100_000)


def growing_batches(runs: int, counts: list[Any]) -> Iterator[tuple[int, list[float]]]:
    pairs = best_pairs(2000)
    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_model(folder, "64x4")
        for count in map(int, counts):
            settings = {"max_steps": max(2, 512 // count), "per_device_train_batch_size": count} | harness.SMALL
            seconds = [harness.train("trl_tpu", model, pairs, **settings).seconds_a_pair for _ in range(runs)]
            yield count, [1000 * statistics.median(seconds)]


def run(system: str, count: str) -> dict[str, float]:
    """Build a trainer on ``count`` pairs: return seconds of the whole constructor, and MiB at its peak."""
    real = best_pairs(2000)
    # no two alike, so that no cache of repeated texts helps
    halves = ("chosen", "rejected")
    pairs = Dataset.from_dict(
        {half: [f"{index} {real[half][index % 2000]}" for index in range(int(count))] for half in halves}
    )
    trainer_class, seconds = harness.package_of(system).RewardTrainer, []
    with tempfile.TemporaryDirectory() as folder:
        model, args = harness.save_model(folder, "64x4"), harness.config(system, folder)
        before = peak_resident_bytes()
        with harness.timed(seconds):
            trainer = trainer_class(model, args, train_dataset=pairs)
            if system == "trl_tpu":  # what XLA measures before the first step, though plain torch does not need it
                plan_rows_of(trainer.train_dataset, 1024, 64, 8, args)
    return {"s": seconds[0], "MiB": (peak_resident_bytes() - before) / 2**20}


def prepared(runs: int, count: int) -> list[float]:
    systems = (harness.TRL, "trl_tpu")
    measured = harness.alternate(runs, systems, lambda system: harness.in_a_process("bench_growth", system, count))
    theirs, ours = measured.values()
    seconds, memory = ([harness.median(each, name) for each in (theirs, ours)] for name in ("s", "MiB"))
    return [*seconds, harness.ratio(ours, theirs, "s"), *memory]


if __name__ == "__main__":
    options = harness.options(run, runs=RUNS, batches=list(BATCHES), counts=list(PAIRS))
    harness.show("pairs a batch", {"ms a pair": ".1f"}, growing_batches(options.runs, options.batches))
    columns = {"TRL s": ".1f", "ours s": ".1f", "times TRL": ".2f", "TRL MiB": ".0f", "ours MiB": ".0f"}
    harness.show("pairs prepared", columns, ((count, prepared(options.runs, count)) for count in options.counts))
