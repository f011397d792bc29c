"""Train on TorchTPU in this process, and write logs and numbers of programs: run by tests.

python tests/support/torchtpu_run.py PACKAGE FOLDER OUT RUNS

The arguments are those of trajectory.py. Each run writes its logs, the number of programs compiled after each step, by
torch_tpu's own count, and its seconds.
"""

import json
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torchtpu_device  # noqa: F401  # before any library looks for a device
from datasets import Dataset
from trajectory import DEFAULTS
from transformers import TrainerCallback


class Programs(TrainerCallback):
    """Counts the compiled programs after each step."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_step_end(self, *args: Any, **_: Any) -> None:
        torch.accelerator.synchronize()
        self.after.append(torch.tpu._get_cache_misses() - self.before)

    def on_train_begin(self, *args: Any, **_: Any) -> None:
        self.before = torch.tpu._get_cache_misses()


def train(package: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    module, programs = import_module(package), Programs()
    pairs = Dataset.from_list([json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()])
    with tempfile.TemporaryDirectory() as out:
        args = module.RewardConfig(out, **DEFAULTS | settings)
        trainer = module.RewardTrainer(str(folder / "model"), args, train_dataset=pairs, callbacks=[programs])
        start = time.monotonic()
        trainer.train()
    seconds = time.monotonic() - start
    plan = str(trainer.batch_plan.layout) if package == "trl_tpu" else "TRL's"
    return {"logs": trainer.state.log_history, "programs": programs.after, "seconds": seconds, "batches": plan}


def main(package: str, folder: str, out: str, runs: str) -> None:
    torch.set_num_threads(1)
    results = {name: train(package, Path(folder), settings) for name, settings in json.loads(runs).items()}
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
