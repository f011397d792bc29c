"""EasyDeL 0.3.0 beside TRL 1.16 and this package: the same model of hidden size 64, the same pairs, the same batches.

python -m tests.benchmarks.beside_easydel --python FOLDER/bin/python [--steps 12] [--runs 3]

EasyDeL wants an environment of its own, on JAX's CPU device:

python3.11 -m venv FOLDER && FOLDER/bin/pip install easydel==0.3.0 pillow torch

Systems alternate, each run in a process of its own, on 8 pairs a batch in the data's order, of `max_length` 1,024, in
float32 with AdamW at a constant rate. Seconds are medians over steps that compile nothing: of the clock, and of all
cores together, which other work on the machine changes little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

PAIRS_A_BATCH, LEARNING_RATE, MAX_LENGTH = 8, 1e-4, 1024
EASYDEL = "EasyDeL 0.3.0"
SYSTEMS = {
    "TRL 1.16": {"USE_TORCH_XLA": "0"},
    "trl_tpu": {"USE_TORCH_XLA": "0"},
    "trl_tpu, XLA": {"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU"},
    EASYDEL: {},
}


def run(system: str, folder: str, pairs: str, steps: int) -> dict[str, Any]:
    """Train by TRL or by this package, and return what was measured."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback

    from .bench_real_model import package_of, tokens_in

    torch.set_num_threads(1)  # several wait for one another, and use up a core by it
    disable_progress_bars()
    package, settings = package_of("TRL 1.16" if system == "TRL 1.16" else "trl_tpu")
    on_xla = os.environ.get("PJRT_DEVICE") == "CPU"
    ends: list[tuple[float, float]] = []
    programs: list[int] = []

    def compiles() -> int:
        if not on_xla:
            return 0
        import torch_xla.debug.metrics as met

        return (met.metric_data("CompileTime") or [0])[0]

    class Timed(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:  # every step is logged, which waits for it
            ends.append((time.perf_counter(), time.process_time()))
            programs.append(compiles())

    with tempfile.TemporaryDirectory() as output:
        args = package.RewardConfig(
            output, bf16=False, max_steps=steps, per_device_train_batch_size=PAIRS_A_BATCH, max_length=MAX_LENGTH,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", gradient_checkpointing=False, logging_steps=1,
            train_sampling_strategy="sequential", save_strategy="no", report_to="none", disable_tqdm=True, **settings,
        )  # fmt: skip
        rows = [{f"{half}_ids": ids for half, ids in pair.items()} for pair in json.loads(Path(pairs).read_text())]
        trainer = package.RewardTrainer(folder, args, train_dataset=Dataset.from_list(rows), callbacks=[Timed()])
        trainer.train()
        tokens = tokens_in(islice(trainer.get_train_dataloader(), steps))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # the last log is of the whole run
    return {"ends": ends[:steps], "programs": programs[:steps], "tokens": tokens, "losses": losses}


def seconds_a_pair(ends: list[list[float]], programs: list[int]) -> list[float]:
    """The medians of the clock and of all cores over steps that compile nothing; a step is what follows another."""
    usual = [n for n in range(1, len(ends)) if programs[n] == programs[n - 1]]
    return [
        statistics.median(clock[n] - clock[n - 1] for n in usual) / PAIRS_A_BATCH for clock in zip(*ends, strict=True)
    ]


def in_a_process(system: str, python: str, folder: str, pairs: str, steps: int) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("USE_TORCH_XLA", "PJRT"))}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | SYSTEMS[system]
    if system == EASYDEL:
        environment.pop("PYTHONPATH", None)
        side = str(Path(__file__).with_name("easydel_side.py"))
        numbers = map(str, (steps, PAIRS_A_BATCH, LEARNING_RATE, MAX_LENGTH))
        command = [python, side, folder, pairs, *numbers]
    else:
        words = ["--run", system, folder, pairs, str(steps)]
        command = [sys.executable, "-m", "tests.benchmarks.beside_easydel", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["pair"] = seconds_a_pair(found["ends"], found["programs"])
    print(f"{system}: {found['pair'][0]:.3f} s a pair, {found['pair'][1]:.3f} of all cores", flush=True)
    return found


def compare(python: str, steps: int, runs: int) -> None:
    import real_pairs
    from transformers import AutoTokenizer

    os.environ["USE_TORCH_XLA"] = "0"  # here
    from .bench_time_per_pair import save_model

    texts = real_pairs.best_pairs(2 * steps * PAIRS_A_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(f"{folder}/model", "64x4", texts)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenized = [
            {half: tokenizer(row[half] + tokenizer.eos_token)["input_ids"] for half in ("chosen", "rejected")}
            for row in texts
        ]
        fitting = [pair for pair in tokenized if max(map(len, pair.values())) <= MAX_LENGTH]
        trained = fitting[: steps * PAIRS_A_BATCH]
        pairs = Path(folder, "pairs.json")
        pairs.write_text(json.dumps(trained))
        measured: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
        for _ in range(runs):
            for system, results in measured.items():
                results.append(in_a_process(system, python, model, str(pairs), steps))
    real = sum(len(ids) for pair in trained for ids in pair.values())
    theirs = measured["TRL 1.16"][0]["losses"]
    print(f"\nhidden size 64, 4 layers, {steps} steps of {PAIRS_A_BATCH} pairs, medians of {runs} runs")
    columns = f"{'programs':>10}{'tokens a real one':>19}{'difference of first loss':>26}{'of any':>9}"
    print(f"{'':14}{'s a pair':>10}{'of all cores':>14}{columns}")
    for system, results in measured.items():
        clock, cores = (statistics.median(each) for each in zip(*(found["pair"] for found in results), strict=True))
        programs = str(results[0]["programs"][-1] or "-")
        apart = [abs(a - b) for a, b in zip(results[0]["losses"], theirs, strict=True)]
        tokens = results[0]["tokens"] / real
        print(f"{system:14}{clock:10.3f}{cores:14.3f}{programs:>10}{tokens:19.2f}{apart[0]:26.1e}{max(apart):9.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", help="the Python of EasyDeL's environment")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        system, folder, pairs, steps = options.run
        print(json.dumps(run(system, folder, pairs, int(steps))))
    elif options.python:
        compare(options.python, options.steps, options.runs)
    else:
        sys.exit("Name the Python of an environment with EasyDeL: --python FOLDER/bin/python.")
