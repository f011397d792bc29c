"""Train for 2,000 steps with evaluations and saves, and check that resource use stays flat: `make long-run`, or

PJRT_DEVICE=CPU python tests/support/long_run.py [STEPS]

After a warm-up of a fifth of the steps, these are measured every 50 steps: allocated host memory (RssAnon), open file
descriptors, threads, and memory maps. Medians over the first and the last ten measurements are compared. Prints a
table, and exits with an error if a value grew.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from environment import private_bytes
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer, runtime

EVERY = 50
PROCESS = Path("/proc/self")


#: Functions that measure, and the allowed relative growth after the warm-up.
MEASURES: dict[str, tuple[Callable[[], float], float]] = {
    "memory (MiB)": (lambda: private_bytes() / 2**20, 0.05),
    "open files": (lambda: len(os.listdir(PROCESS / "fd")), 0),
    "threads": (lambda: len(os.listdir(PROCESS / "task")), 0),
    "memory maps": (lambda: len((PROCESS / "maps").read_text().splitlines()), 0.05),
    "compiles": (lambda: runtime.current().compile_count() or 0, 0),
    "objects": (lambda: len(gc.get_objects()), 0.05),
}


class Measure(TrainerCallback):
    """Measures the process every `EVERY` steps."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % EVERY:
            return
        gc.collect()
        row = {name: measure() for name, (measure, _) in MEASURES.items()}
        self.rows.append({"step": state.global_step, "s": time.monotonic() - self._begun, **row})
        print({name: round(value, 1) for name, value in self.rows[-1].items()}, file=sys.stderr, flush=True)


def run(steps: int, folder: str) -> list[dict[str, float]]:
    pairs = tiny.made_up_pairs(600)
    model = tiny.save_tiny(Path(folder, "model"), pairs, hidden=16, layers=1)
    settings: dict[str, Any] = {"max_steps": steps, "max_shapes": 2, "report_to": "none", "disable_tqdm": True}
    settings |= {"logging_steps": 10, "eval_strategy": "steps", "eval_steps": 100}
    settings |= {"save_strategy": "steps", "save_steps": 50, "save_total_limit": 2}
    args = RewardConfig(f"{folder}/out", per_device_train_batch_size=8, per_device_eval_batch_size=8, **settings)
    measure = Measure()
    train, held_out = pairs.select(range(560)), pairs.select(range(560, 600))
    RewardTrainer(model, args, train_dataset=train, eval_dataset=held_out, callbacks=[measure]).train()
    return measure.rows


def growth_table(rows: list[dict[str, float]]) -> list[str]:
    """Return a table row per measure, with "GROWS" at the end if it grew too much."""
    settled = rows[len(rows) // 5 :]
    some = min(10, len(settled) // 2)
    lines = [f"{'after warm-up':<14} {'first':>10} {'last':>10} {'growth':>8}"]
    for name, (_, part) in MEASURES.items():
        first, last = (statistics.median(row[name] for row in chosen) for chosen in (settled[:some], settled[-some:]))
        grows = last > first * (1 + part)
        lines.append(f"{name:<14} {first:>10.1f} {last:>10.1f} {last / max(first, 1) - 1:>+8.2%}{' GROWS' * grows}")
    return lines


def main(steps: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        rows = run(steps, folder)
    lines = growth_table(rows)
    print(f"{steps} steps in {rows[-1]['s']:.0f} s on {runtime.current().topology().description}")
    print("\n".join(lines))
    return int(any(line.endswith("GROWS") for line in lines))


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
