"""A real model compared with TRL 1.16: SmolLM2-135M on HH-RLHF, plain torch, float32, gradient checkpointing.

python -m tests.benchmarks.bench_real_model [--trained all adapters] [--steps 6] [--runs 2]

Full fine-tuning, and LoRA. Systems alternate, each run in a separate process, from the same weights and on the same
pairs in the same order. The weights come with the extra `[bench]`; without it the benchmark prints a note and exits.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from real_pairs import best_pairs

from trl_tpu.runtime.native import peak_resident_bytes

from . import harness, smollm2

SYSTEMS = (harness.TRL, "trl_tpu")
LEARNING_RATES = {"all": 2e-5, "adapters": 1e-4}


def run(system: str, trained: str, folder: str, steps: str) -> dict[str, Any]:
    """Train, and return the measurements."""
    from peft import LoraConfig

    lora = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules="all-linear")
    pairs = best_pairs(harness.PAIRS_A_BATCH * int(steps))
    done = harness.train(
        system, folder, pairs, peft_config=lora if trained == "adapters" else None, max_steps=int(steps),
        max_length=1024, learning_rate=LEARNING_RATES[trained], gradient_checkpointing=True,
    )  # fmt: skip
    assert len(done.trainer.train_dataset) == len(pairs), "a pair is longer than max_length"
    return {
        "s per pair": done.seconds_per_pair,
        "tokens per real token": done.tokens() / done.real_tokens(),  # every pair once, so the order does not matter
        "GiB": peak_resident_bytes() / 2**30,
        "losses": done.losses,
    }


def compare(trained: str, folder: str, steps: int, runs: int) -> None:
    measured = harness.alternate(
        runs, SYSTEMS, lambda system: harness.in_a_process("bench_real_model", system, trained, folder, steps)
    )
    harness.show_compared_with_trl(
        f"{smollm2.NAME}, {trained} trained, {steps} steps of {harness.PAIRS_A_BATCH} pairs, medians of {runs} runs",
        {"s per pair": ".2f", "tokens per real token": ".3f", "GiB": ".1f"},
        measured,
        shares=["s per pair", "GiB"],
    )


if __name__ == "__main__":
    options = harness.options(run, trained=LEARNING_RATES, steps=6, runs=2)
    if not smollm2.is_installed():
        sys.exit(print(smollm2.MISSING))
    with tempfile.TemporaryDirectory() as folder:
        model = smollm2.save(Path(folder))
        for trained in options.trained:
            compare(trained, model, options.steps, options.runs)
