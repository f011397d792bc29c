"""A real model compared with TRL 1.16: SmolLM2-135M on HH-RLHF, float32 on a CPU, gradient checkpointing.

python -m tests.benchmarks.bench_real_model [--trained all adapters] [--steps 6] [--runs 2]

Full fine-tuning, and LoRA. The first step is not timed. Systems alternate, each run in a separate process, from the
same weights and on the same pairs in the same order. The weights come with the extra `[bench]`; without it the
benchmark prints a note and exits.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from real_pairs import best_pairs
from transformers import TrainerCallback

from trl_tpu import runtime

from . import harness

SYSTEMS = (harness.TRL, "trl_tpu")
LEARNING_RATES = {"all": 2e-5, "adapters": 1e-4}


class StepClock(TrainerCallback):
    """Measures the steps after the first ``warm`` ones. The host waits for the device at both ends only."""

    def __init__(self, warm: int = 1) -> None:
        self.warm, self.seconds_per_step, self.begin = warm, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (self.warm, args.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds_per_step = (time.perf_counter() - self.begin) / max(1, args.max_steps - self.warm)
            self.begin = time.perf_counter()


def measured(
    system: str, model: Any, pairs: Dataset, trained: str, batch: int, steps: int, warm: int = 1, **settings: Any
) -> dict[str, Any]:
    """Train ``trained`` weights, and return the measurements."""
    lora = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules="all-linear")
    clock, device = StepClock(warm), runtime.current().device
    done = harness.train(
        system, model, pairs, peft_config=lora if trained == "adapters" else None, callbacks=[clock], max_steps=steps,
        max_length=1024, learning_rate=LEARNING_RATES[trained], gradient_checkpointing=True,
        per_device_train_batch_size=batch, **settings,
    )  # fmt: skip
    assert len(done.trainer.train_dataset) == len(pairs), "a pair is longer than max_length"
    return {
        "s per pair": clock.seconds_per_step / batch,
        "tokens per real token": done.tokens() / done.real_tokens(),  # every pair once, so the order does not matter
        "GiB": (runtime.current().peak_memory(device) or 0) / 2**30,
        "losses": done.losses,
    }


def run(system: str, trained: str, batch: str, folder: str, steps: str) -> Any:
    """Train on real pairs in this process, and return the measurements."""
    return measured(system, folder, best_pairs(int(batch) * int(steps)), trained, int(batch), int(steps))


def compare(trained: str, batch: int, folder: str, steps: int, runs: int) -> None:
    title = f"{harness.SMOLLM2}, {trained} trained, {steps} steps of {batch} pairs, medians of {runs} runs"
    columns = {"s per pair": ".4f", "tokens per real token": ".3f", "GiB": ".1f"}

    def apart(system: str) -> dict[str, Any]:
        return harness.in_a_process("bench_real_model", system, trained, batch, folder, steps)

    harness.compare_systems(title, runs, SYSTEMS, apart, columns, shares=["s per pair", "GiB"])


if __name__ == "__main__":
    options = harness.options(run, trained=LEARNING_RATES, batch=8, steps=6, runs=2)
    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_smollm2(Path(folder))
        for trained in options.trained:
            compare(trained, options.batch, model, options.steps, options.runs)
