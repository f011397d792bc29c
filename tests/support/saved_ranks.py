"""One of COUNT processes, or a process that leads XLA devices: trains, saves and writes its logs to its folder.

saved_ranks.py MODEL SETTINGS [COUNT RANK]. SETTINGS is JSON for RewardConfig, with additional keys: "resume",
"adapters", "told" (the step at which process 1 gets a SIGTERM), and "small" (a rank, and the maximum file size in
bytes while step 2 is saved).
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from peft import LoraConfig
from subprocesses import become_rank
from training import QUIET, At, sigterm
from transformers import TrainerCallback

import trl_tpu
from trl_tpu.runtime import choice

SETTINGS: dict[str, Any] = QUIET | {"max_steps": 6, "total_batch_size": 8, "logging_steps": 1, "save_steps": 2}
SETTINGS |= {"learning_rate": 1e-4, "lr_scheduler_type": "constant"}
SETTINGS |= {"use_cpu": choice().name == "native" and torch.accelerator.is_available()}  # otherwise the config decides


class SmallFiles(TrainerCallback):
    """Simulates a full disk on one rank while step 2 is saved. Its `on_save` makes training wait for the save."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._limits = rank, size, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and args.process_index == self._rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._limits[1]))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


def main(model: str, settings: dict[str, Any]) -> None:
    own = {name: settings.pop(name, None) for name in ("resume", "adapters", "told", "small")}
    args = trl_tpu.RewardConfig(**SETTINGS | settings)
    pairs = tiny.made_up_pairs(39)
    callbacks: list[TrainerCallback] = [SmallFiles(*own["small"])] if own["small"] else []
    if own["told"] and args.process_index == 1:
        callbacks.append(At("on_step_end", own["told"], sigterm))
    lora = LoraConfig(task_type="SEQ_CLS", r=4) if own["adapters"] else None
    data = {"train_dataset": pairs, "eval_dataset": pairs.select(range(8)), "callbacks": callbacks}
    trainer = trl_tpu.RewardTrainer(model, args, **data, peft_config=lora)
    try:
        trainer.train(own["resume"])
        trainer.save_model()
    finally:
        logged = {log["step"]: (log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log}
        failed = [Path(place).name for place in trainer.checkpointer.failed]
        found = {"logged": logged, "stopped by": trainer.stopped_by, "failed": failed}
        Path(str(args.output_dir), f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
    trainer.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, given, *place = sys.argv[1:]
    if place:
        count, rank = place
        become_rank(rank, count)
    main(model_folder, json.loads(given))
