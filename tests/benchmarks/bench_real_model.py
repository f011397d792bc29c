"""A real model compared with TRL 1.16: SmolLM2-135M on HH-RLHF, plain torch, gradient checkpointing.

python -m tests.benchmarks.bench_real_model [--trained all adapters] [--steps 6] [--runs 2]
python -m tests.benchmarks.bench_real_model --precision bfloat16 --attention sdpa flash_attention_4 --batch 32  # GPU

Full fine-tuning, and LoRA. The first step is not timed. Systems alternate, each run in a separate process, from the
same weights and on the same pairs in the same order. The weights come with the extra `[bench]`; without it the
benchmark prints a note and exits.
"""

import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from real_pairs import best_pairs
from transformers import TrainerCallback

from trl_tpu import runtime

from . import harness

SYSTEMS = (harness.TRL, "trl_tpu")
LEARNING_RATES = {"all": 2e-5, "adapters": 1e-4}


class StepClock(TrainerCallback):
    """Notes the time after each step."""

    def __init__(self) -> None:
        self.times = list[float]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def run(system: str, trained: str, precision: str, attention: str, batch: str, folder: str, steps: str) -> Any:
    """Train, and return the measurements."""
    from peft import LoraConfig

    lora = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules="all-linear")
    pairs, clock = best_pairs(int(batch) * int(steps)), StepClock()
    done = harness.train(
        system, folder, pairs, peft_config=lora if trained == "adapters" else None, callbacks=[clock],
        max_steps=int(steps), max_length=1024, learning_rate=LEARNING_RATES[trained], gradient_checkpointing=True,
        per_device_train_batch_size=int(batch), bf16=precision == "bfloat16",
        model_init_kwargs={"attn_implementation": attention},
    )  # fmt: skip
    assert len(done.trainer.train_dataset) == len(pairs), "a pair is longer than max_length"
    return {
        "s per pair": (clock.times[-1] - clock.times[0]) / (int(steps) - 1) / int(batch),
        "tokens per real token": done.tokens() / done.real_tokens(),  # every pair once, so the order does not matter
        "GiB": runtime.current().peak_memory(runtime.current().device) / 2**30,
        "losses": done.losses,
    }


def compare(trained: str, precision: str, attention: str, batch: int, folder: str, steps: int, runs: int) -> None:
    words = trained, precision, attention, batch, folder, steps
    title = f"{harness.SMOLLM2}, {trained} trained, {precision}, {attention}, {steps} steps of {batch} pairs"
    columns = {"s per pair": ".4f", "tokens per real token": ".3f", "GiB": ".1f"}

    def apart(system: str) -> dict[str, Any]:
        return harness.in_a_process("bench_real_model", system, *words)

    harness.compare_with_trl(
        f"{title}, medians of {runs} runs", runs, SYSTEMS, apart, columns, shares=["s per pair", "GiB"]
    )


if __name__ == "__main__":
    options = harness.options(
        run, trained=LEARNING_RATES, precision=["float32"], attention=["sdpa"], batch=8, steps=6, runs=2
    )
    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_smollm2(Path(folder))
        for choice in product(options.trained, options.precision, options.attention):
            compare(*choice, options.batch, model, options.steps, options.runs)
