"""EasyDeL 0.3.0 compared with TRL 1.16 and this package: the same model of hidden size 64, pairs and batches.

python -m tests.benchmarks.beside_easydel --python FOLDER/bin/python [--steps 12] [--runs 3]

EasyDeL needs a separate environment, on JAX's CPU device:

python3.11 -m venv FOLDER && FOLDER/bin/pip install easydel==0.3.0 pillow torch

Systems alternate, each run in a separate process, with 8 pairs per batch in the data's order, `max_length` 1,024,
float32 and AdamW at a constant rate. Seconds are medians over steps without compilation: by the clock, and summed over
all cores, which other work on the machine changes little.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from real_pairs import best_pairs
from transformers import AutoTokenizer, TrainerCallback

from . import harness
from .harness import PAIRS_A_BATCH

LEARNING_RATE, MAX_LENGTH = 1e-4, 1024
EASYDEL = "EasyDeL 0.3.0"
SYSTEMS: dict[str, dict[str, str]] = {harness.TRL: {}, "trl_tpu": {}, "trl_tpu, XLA": harness.XLA, EASYDEL: {}}


def run(system: str, folder: str, pairs: str, steps: str) -> dict[str, Any]:
    """Train with TRL or this package, and return the measurements."""
    torch.set_num_threads(1)  # several threads would use a core for waiting
    ends: list[tuple[float, float]] = []
    programs: list[int] = []

    def compiles() -> int:
        if system != "trl_tpu, XLA":
            return 0
        import torch_xla.debug.metrics as met

        return (met.metric_data("CompileTime") or [0])[0]

    class Timed(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:  # logging every step waits for it
            ends.append((time.perf_counter(), time.process_time()))
            programs.append(compiles())

    rows = [{f"{half}_ids": ids for half, ids in pair.items()} for pair in json.loads(Path(pairs).read_text())]
    trained = harness.train(
        system, folder, Dataset.from_list(rows), callbacks=[Timed()], max_steps=int(steps), max_length=MAX_LENGTH,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", gradient_checkpointing=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    # the last log is a summary
    return {"ends": ends[:-1], "programs": programs[:-1], "tokens": trained.tokens(), "losses": trained.losses}


def seconds_per_pair(ends: list[list[float]], programs: list[int]) -> list[float]:
    """Return median seconds of the clock and of all cores per pair, over steps without compilation."""
    usual = [n for n in range(1, len(ends)) if programs[n] == programs[n - 1]]
    return [
        statistics.median(clock[n] - clock[n - 1] for n in usual) / PAIRS_A_BATCH for clock in zip(*ends, strict=True)
    ]


def in_a_process(system: str, python: str, folder: str, pairs: str, steps: int, real: int) -> dict[str, Any]:
    if system == EASYDEL:
        side = str(Path(__file__).with_name("easydel_side.py"))
        numbers = map(str, (steps, PAIRS_A_BATCH, LEARNING_RATE, MAX_LENGTH))
        ours = ("USE_TORCH_XLA", "PJRT", "PYTHONPATH")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        environment |= {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "disabled"}
        found = harness.result_of([python, side, folder, pairs, *numbers], environment)
    else:
        found = harness.in_a_process("beside_easydel", system, folder, pairs, steps, **SYSTEMS[system])
    clock, cores = seconds_per_pair(found["ends"], found["programs"])
    print(f"{system}: {clock:.3f} s per pair, {cores:.3f} of all cores", flush=True)
    numbers = {"s per pair": clock, "of all cores": cores, "programs": found["programs"][-1]}
    return numbers | {"tokens per real token": found["tokens"] / real, "losses": found["losses"]}


def tokenized(model: str, count: int) -> list[dict[str, list[int]]]:
    """Return the first pairs that fit into ``MAX_LENGTH``."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [
        {half: tokenizer(row[half] + tokenizer.eos_token)["input_ids"] for half in ("chosen", "rejected")}
        for row in best_pairs(2 * count)
    ]
    return [pair for pair in pairs if max(map(len, pair.values())) <= MAX_LENGTH][:count]


def compare(python: str, steps: int, runs: int) -> None:
    count = steps * PAIRS_A_BATCH
    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_model(f"{folder}/model", "64x4", best_pairs(2 * count))
        trained, pairs = tokenized(model, count), Path(folder, "pairs.json")
        pairs.write_text(json.dumps(trained))
        real = sum(len(ids) for pair in trained for ids in pair.values())
        measured = harness.alternate(
            runs, SYSTEMS, lambda system: in_a_process(system, python, model, str(pairs), steps, real)
        )
    harness.show_compared_with_trl(
        f"hidden size 64, 4 layers, {steps} steps of {PAIRS_A_BATCH} pairs, medians of {runs} runs",
        {"s per pair": ".3f", "of all cores": ".3f", "programs": ".0f", "tokens per real token": ".2f"},
        measured,
        shares=[],
    )


if __name__ == "__main__":
    options = harness.options(run, python="", steps=12, runs=3)
    if not options.python:
        sys.exit("Name the Python of an environment with EasyDeL: --python FOLDER/bin/python.")
    compare(options.python, options.steps, options.runs)
