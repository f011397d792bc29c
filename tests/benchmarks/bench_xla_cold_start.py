"""Cold start of XLA on the CPU, compilation included: our first 100 steps compared with TRL 1.16's first 20.

python -m tests.benchmarks.bench_xla_cold_start [--runs 3] [--steps 20 100]

Each run is a separate process. TRL has the only settings with which it starts on torch_xla: no recomputation, an
unfused optimizer, float32. Ours are the defaults except for the same precision.
"""

import tempfile
from pathlib import Path
from typing import Any

import tiny
from real_pairs import best_pairs

from . import harness

HIDDEN, LAYERS, LOGGED = 128, 4, 20
SETTINGS: dict[str, dict[str, Any]] = {
    harness.TRL: {"optim": "adamw_torch", "gradient_checkpointing": False},
    "trl_tpu": {},
}


def run(system: str, model: str, steps: str) -> dict[str, float]:
    """Train; return seconds since before the trainer is created, compilations, and the mean loss of 20 steps."""
    import torch_xla.debug.metrics as met

    settings = {"lr_scheduler_type": "constant", "logging_steps": LOGGED} | SETTINGS[system]
    pairs, seconds = best_pairs(1000), []
    harness.package_of(system)  # imported before the clock starts
    with harness.timed(seconds):
        trained = harness.train(system, model, pairs, max_steps=int(steps), **settings)
    return {"seconds": seconds[0], "compiles": met.metric_data("CompileTime")[0], "loss": trained.losses[0]}


def compare(runs: int, steps: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save_tiny(Path(folder), best_pairs(400), HIDDEN, LAYERS)

        def of(system: str) -> dict[str, float]:
            return harness.in_a_process("bench_xla_cold_start", system, model, steps[system], **harness.XLA)

        measured = harness.alternate(runs, steps, of)
    batch = f"{harness.PAIRS_A_BATCH} pairs a batch"
    harness.show(
        f"XLA:CPU, one device, hidden {HIDDEN}, {LAYERS} layers, {batch}, from a cold start",
        {"steps": "", "seconds": ".1f", "compiles": ".0f", f"loss of the first {LOGGED}": ".6f"},
        (
            (system, [steps[system], *(harness.median(results, name) for name in results[0])])
            for system, results in measured.items()
        ),
    )
    theirs, ours = measured.values()
    ratio, (of_theirs, of_ours) = harness.ratio(ours, theirs, "seconds"), steps.values()
    print(f"our {of_ours} steps take {ratio:.2f} of the time of TRL's {of_theirs}")


if __name__ == "__main__":
    options = harness.options(run, runs=3, steps=[20, 100])
    compare(options.runs, dict(zip(SETTINGS, map(int, options.steps), strict=True)))
