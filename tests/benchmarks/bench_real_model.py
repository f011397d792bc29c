"""A real model beside TRL 1.16: SmolLM2-135M on pairs of HH-RLHF, in plain torch, float32, gradient checkpointing.

python -m tests.benchmarks.bench_real_model [--trained all adapters] [--steps 6] [--runs 2]

Full fine-tuning, and LoRA. Systems alternate, each run in a process of its own, from the same weights and on the same
pairs in the same order. The weights are those of the extra `[bench]`; without it this says so and measures nothing.
"""

import os

os.environ.setdefault("USE_TORCH_XLA", "0")  # before transformers is imported
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

STEPS, RUNS, PAIRS_A_BATCH, MAX_LENGTH = 6, 2, 8, 1024
SYSTEMS = ("TRL 1.16", "trl_tpu")
LEARNING_RATES = {"all": 2e-5, "adapters": 1e-4}


def package_of(system: str) -> tuple[Any, dict[str, Any]]:
    """The package of a system, and the settings that it needs to train in plain torch."""
    if system == "trl_tpu":
        import trl_tpu

        return trl_tpu, {}
    import trl

    return trl, {"use_cpu": True}


def tokens_in(batches: Any) -> int:
    """The tokens that batches of any layout compute, padding among them."""
    from trl_tpu.data.batch import apart, tensors_in

    parts = [tensors_in(part) for batch in batches for part in apart(batch)]
    return sum(part["input_ids_RL" if "input_ids_RL" in part else "input_ids"].numel() for part in parts)


def run(system: str, trained: str, folder: str, steps: int) -> dict[str, Any]:
    """Train, and return what was measured."""
    import real_pairs
    import torch
    from datasets import disable_progress_bars
    from peft import LoraConfig

    from trl_tpu.data.measure import read_row
    from trl_tpu.runtime.native import peak_resident_bytes

    torch.set_num_threads(2)
    disable_progress_bars()
    package, settings = package_of(system)
    lora = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as output:
        args = package.RewardConfig(
            output, bf16=False, max_steps=steps, per_device_train_batch_size=PAIRS_A_BATCH, max_length=MAX_LENGTH,
            learning_rate=LEARNING_RATES[trained], gradient_checkpointing=True, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, **settings,
        )  # fmt: skip
        pairs = real_pairs.best_pairs(PAIRS_A_BATCH * steps)
        peft_config = lora if trained == "adapters" else None
        trainer = package.RewardTrainer(folder, args, train_dataset=pairs, peft_config=peft_config)
        assert len(trainer.train_dataset) == len(pairs), "a pair is longer than max_length"
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        real = sum(len(ids) for row in trainer.train_dataset for ids in read_row(row)["answers"])
        batches = list(islice(trainer.get_train_dataloader(), steps))  # all pairs once: in which order is the same
    return {
        "pair": seconds / (steps * PAIRS_A_BATCH),
        "tokens": tokens_in(batches) / real,
        "memory": peak_resident_bytes(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def in_a_process(system: str, trained: str, folder: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_real_model", "--run", system, trained, folder, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(trained: str, folder: str, steps: int, runs: int) -> None:
    measured: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for _ in range(runs):
        for system in SYSTEMS:
            measured[system].append(in_a_process(system, trained, folder, steps))
    print(f"\nSmolLM2-135M, {trained} trained, {steps} steps of {PAIRS_A_BATCH} pairs, medians of {runs} runs")
    print(f"{'':12}{'s a pair':>10}{'of TRL':>9}{'tokens a real one':>19}{'GiB':>7}{'of TRL':>9}{'difference':>12}")
    theirs = measured[SYSTEMS[0]]
    for system, ours in measured.items():

        def ratio(name: str, ours: list[dict[str, Any]] = ours) -> float:
            return statistics.median(one[name] / other[name] for one, other in zip(ours, theirs, strict=True))

        pair, tokens, memory = (
            statistics.median(each[name] for each in ours) for name in ("pair", "tokens", "memory")
        )
        difference = max(abs(a - b) for a, b in zip(ours[0]["losses"], theirs[0]["losses"], strict=True))
        print(
            f"{system:12}{pair:10.2f}{ratio('pair'):9.3f}{tokens:19.3f}{memory / 2**30:7.1f}{ratio('memory'):9.2f}"
            f"{difference:12.1e}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trained", nargs="*", default=list(LEARNING_RATES), choices=list(LEARNING_RATES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        system, trained, folder, steps = options.run
        with contextlib.redirect_stdout(sys.stderr):
            found = run(system, trained, folder, int(steps))
        print(json.dumps(found))
        sys.exit()
    import smollm2

    if not smollm2.is_installed():
        sys.exit(print(smollm2.MISSING))
    with tempfile.TemporaryDirectory() as folder:
        model = smollm2.save(Path(folder))
        for trained in options.trained:
            compare(trained, model, options.steps, options.runs)
