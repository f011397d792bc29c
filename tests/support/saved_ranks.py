"""One of COUNT processes, or one that leads XLA's devices, that trains, saves and writes what it logged to its folder.

saved_ranks.py MODEL SETTINGS [COUNT RANK], where SETTINGS are those of RewardConfig as JSON, and of this program
"resume", "adapters" and "told": the step at which process 1 gets a SIGTERM.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from peft import LoraConfig
from transformers import TrainerCallback

import trl_tpu
from trl_tpu.runtime import choice

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "total_batch_size": 8,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_steps": 2,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": choice().name == "native",
}


class Told(TrainerCallback):
    """Sends process 1 a SIGTERM."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step and args.process_index == 1:
            signal.raise_signal(signal.SIGTERM)


def main(model: str, settings: dict[str, Any]) -> None:
    own = {name: settings.pop(name, None) for name in ("resume", "adapters", "told")}
    args = trl_tpu.RewardConfig(**SETTINGS | settings)
    pairs = tiny.made_up_pairs(39)
    trainer = trl_tpu.RewardTrainer(
        model,
        args,
        train_dataset=pairs,
        eval_dataset=pairs.select(range(8)),
        peft_config=LoraConfig(task_type="SEQ_CLS", r=4) if own["adapters"] else None,
        callbacks=[Told(own["told"])] if own["told"] else [],
    )
    try:
        trainer.train(own["resume"])
        trainer.save_model()
    finally:
        logged = {log["step"]: (log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log}
        found = {"logged": logged, "stopped by": trainer.stopped_by}
        Path(str(args.output_dir), f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
    trainer.end()  # as a script should: threads of a group that is left have aborted a process at its exit


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, given, *place = sys.argv[1:]
    if place:
        count, rank = place
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    main(model_folder, json.loads(given))
