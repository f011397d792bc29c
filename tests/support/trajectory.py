"""Train in this process and write the logs: run by tests, one process per setting.

python tests/support/trajectory.py PACKAGE FOLDER OUT RUNS [RANK]

PACKAGE is trl or trl_tpu. RUNS is JSON: names of runs to arguments of RewardConfig and `data`, the folder in FOLDER
with a `model` and `pairs.jsonl`. With `six_overrides` the trainer is a user's subclass. Arguments for only one package
are below its name. `frozen` is a pattern of parameters to freeze in TRL's model. The environment chooses runtime and
devices. RANK is the rank of one of two processes; the first one writes.
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
from torch.utils.data import SequentialSampler
from training import QUIET

DEFAULTS = QUIET | {"learning_rate": 3e-4, "warmup_steps": 5, "logging_steps": 1, "save_strategy": "no"}


def six_overrides(package: Any) -> type:
    """Return a trainer with six overridden methods; each one affects the logs."""

    class Own(package.RewardTrainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            metrics = self._metrics["train" if self.model.training else "eval"]
            accuracy = self.accelerator.gather_for_metrics(torch.tensor(metrics["accuracy"][-1])).mean().item()
            metrics["error"].append(1 - accuracy)
            loss = loss + 0.1 * outputs.logits.float().square().mean()
            return (loss, outputs) if return_outputs else loss

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            return 2 * loss, logits, labels

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs:
                logs["twice"] = 2 * logs["loss"]
            super().log(logs, start_time)

        def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
            if "chosen_ids" not in dataset.column_names:
                dataset = dataset.filter(lambda row: len(row["rejected"]) > 200)
            prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
            return prepared.select(range(len(prepared) // 8 * 8))

        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def create_optimizer(self, *args: Any) -> Any:
            optimizer = super().create_optimizer(*args)
            optimizer.param_groups[0]["weight_decay"] = 0.1
            return optimizer

    return Own


def train(package: str, folder: Path, settings: dict[str, Any]) -> list[dict[str, float]]:
    module = import_module(package)
    own = {name: settings.pop(name, {}) for name in ("trl", "trl_tpu")}
    settings |= own[package]
    frozen = settings.pop("frozen", None)
    if package == "trl":
        settings["use_cpu"] = not torch.cuda.is_available()
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
        except Exception:  # only the test of this run fails
            results[name] = traceback.format_exc()[-4000:]
    if rank == "0":
        Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
