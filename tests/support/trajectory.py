"""Train for some steps in this process and write what was logged: run by tests, one process for each setting.

python tests/support/trajectory.py PACKAGE MODEL DATA OUT [JSON of RewardConfig arguments]

PACKAGE is trl or trl_tpu; DATA is a JSONL file of pairs; the environment picks the runtime and the devices.
"""

import json
import sys
import tempfile
from importlib import import_module

import torch
from datasets import Dataset

torch.set_num_threads(2)


def main(package: str, model: str, data: str, out: str, settings: str = "{}") -> None:
    module = import_module(package)
    with open(data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "bf16": False,
            "learning_rate": 1e-3,
            "warmup_steps": 5,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            **json.loads(settings),
        }
        if package == "trl":  # TRL's default optimizer is another kernel
            arguments |= {"optim": "adamw_torch", "use_cpu": True}
        args = module.RewardConfig(folder, **arguments)
        trainer = module.RewardTrainer(model, args, train_dataset=Dataset.from_list(rows))
        trainer.train()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(trainer.state.log_history, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
