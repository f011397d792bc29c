"""Train for some steps in this process and write what was logged: run by tests, one process for each setting.

python tests/support/trajectory.py PACKAGE FOLDER OUT RUNS [RANK]

PACKAGE is trl or trl_tpu. RUNS is JSON of names to arguments of RewardConfig and `data`: the folder in FOLDER that has
a `model` and `pairs.jsonl`; with `six_overrides` the trainer is one that a user has changed. What only one of
the packages is told is below its name; of TRL's model, what `frozen` finds is frozen. The environment picks the
runtime and the devices; RANK is that of one of two processes, of which the first writes.
"""

import json
import os
import re
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from six_overrides import six_overrides

DEFAULTS: dict[str, Any] = {
    "bf16": False,
    "learning_rate": 3e-4,
    "warmup_steps": 5,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def train(package: str, folder: Path, settings: dict[str, Any]) -> list[dict[str, float]]:
    module = import_module(package)
    own = {name: settings.pop(name, {}) for name in ("trl", "trl_tpu")}
    settings |= own[package]
    frozen = settings.pop("frozen", None)
    if package == "trl":  # TRL's default optimizer is another kernel
        settings |= {"optim": "adamw_torch", "use_cpu": True}
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    trainer_class = six_overrides(module) if settings.pop("six_overrides", False) else module.RewardTrainer
    data = {"train_dataset": Dataset.from_list(pairs)}
    if "eval_strategy" in settings:
        data["eval_dataset"] = data["train_dataset"].select(range(100))
    with tempfile.TemporaryDirectory() as out:
        args = module.RewardConfig(out, **DEFAULTS | settings)
        trainer = trainer_class(str(folder / "model"), args, **data)
        for name, parameter in trainer.model.named_parameters():
            if frozen is not None and re.search(frozen, name):
                parameter.requires_grad_(False)
        trainer.train()
    return trainer.state.log_history


def main(package: str, folder: str, out: str, runs: str, rank: str = "0") -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank} if "WORLD_SIZE" in os.environ else {}
    results: dict[str, Any] = {}
    for name, settings in json.loads(runs).items():
        try:
            results[name] = train(package, Path(folder, settings.pop("data")), settings)
        except Exception:  # the test of this run fails with it, and the others go on
            results[name] = traceback.format_exc()[-4000:]
    if rank == "0":
        Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
