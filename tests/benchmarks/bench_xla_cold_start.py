"""XLA on the CPU from a cold start, compiles included: our first 100 steps beside TRL 1.16's first 20.

python -m tests.benchmarks.bench_xla_cold_start

Each run is a process of its own. TRL runs with the only settings under which it starts on torch_xla: no recomputed
layers, an unfused optimizer, float32. Ours are the defaults, but for the same precision.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS, HIDDEN, LAYERS, PAIRS_A_BATCH = 3, 128, 4, 8
STEPS = {"TRL 1.16": 20, "trl_tpu": 100}
SETTINGS: dict[str, dict[str, Any]] = {
    "TRL 1.16": {"optim": "adamw_torch", "gradient_checkpointing": False},
    "trl_tpu": {},
}


def run(system: str, model: str) -> None:
    """Train, and print seconds from before the trainer is made, compiles and the mean loss of the first 20 steps."""
    import real_pairs
    import torch_xla.debug.metrics as met
    import trl

    import trl_tpu

    package: Any = {"TRL 1.16": trl, "trl_tpu": trl_tpu}[system]
    pairs = real_pairs.best_pairs(1000)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        args = package.RewardConfig(
            folder,
            bf16=False,
            max_steps=STEPS[system],
            lr_scheduler_type="constant",
            per_device_train_batch_size=PAIRS_A_BATCH,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **SETTINGS[system],
        )
        trainer = package.RewardTrainer(model, args, train_dataset=pairs)
        trainer.train()
    seconds = time.perf_counter() - start
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(seconds, met.metric_data("CompileTime")[0], losses[0])


def compare() -> None:
    import real_pairs
    import tiny

    pairs = real_pairs.best_pairs(400)
    measured: dict[str, list[list[float]]] = {system: [] for system in STEPS}
    with tempfile.TemporaryDirectory() as folder:
        texts = [*pairs["chosen"], *pairs["rejected"]]
        model = tiny.save_tiny(Path(folder), texts, HIDDEN, LAYERS)
        for _ in range(RUNS):
            for system, results in measured.items():
                command = [sys.executable, "-m", "tests.benchmarks.bench_xla_cold_start", system, model]
                environment = {key: value for key, value in os.environ.items() if key != "USE_TORCH_XLA"}
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                if done.returncode:
                    sys.exit(f"{system} failed:\n{done.stderr[-3000:]}")
                results.append([float(word) for word in done.stdout.split()[-3:]])
    print(f"\nXLA:CPU, one device, hidden {HIDDEN}, {LAYERS} layers, {PAIRS_A_BATCH} pairs a batch, from a cold start")
    print(f"{'':12}{'steps':>8}{'seconds':>12}{'compiles':>12}{'loss of the first 20':>24}")
    for system, results in measured.items():
        seconds, compiles, loss = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{system:12}{STEPS[system]:8}{seconds:12.1f}{compiles:12.0f}{loss:24.6f}")
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(measured["trl_tpu"], measured["TRL 1.16"], strict=True)]
    print(f"our 100 steps take {statistics.median(ratios):.2f} of the time of TRL's 20")


if __name__ == "__main__":
    os.environ |= {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    if len(sys.argv) == 3:
        run(*sys.argv[1:])
    else:
        os.environ["USE_TORCH_XLA"] = "0"  # here; the runs are on XLA
        compare()
