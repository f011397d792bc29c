"""One of two processes of plain torch: two_processes.py MODEL FOLDER [RANK]

With RANK it tells itself what torchrun would tell it.

Train without a stop; then with one, in the middle between two logs, after which training goes on from the checkpoint.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from stopping import At, sigterm
from timings import untimed
from torch import nn
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.training.preemption import Unfinished

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 4,
    "save_steps": 2,
    "learning_rate": 1e-3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "load_best_model_at_end": False,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_trainer(model: str, folder: Path, *callbacks: TrainerCallback, **settings: Any) -> RewardTrainer:
    pairs = tiny.made_up_pairs(64)
    args = RewardConfig(str(folder), **{"per_device_train_batch_size": 2} | SETTINGS | settings)
    return RewardTrainer(
        model, args, train_dataset=pairs, eval_dataset=pairs.select(range(16)), callbacks=list(callbacks)
    )


def logged(trainer: RewardTrainer) -> list[dict[str, float]]:
    """What was logged of training and evaluation, without times."""
    return [log for log in map(untimed, trainer.state.log_history) if "train_loss" not in log]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def main(model: str, folder: Path) -> None:
    whole = make_trainer(model, folder / "whole")
    whole.train()
    first = whole.args.process_index == 0
    # the other process alone is told to stop, before an evaluation, which is left out
    stopped = make_trainer(model, folder / "stopped", *([] if first else [At("on_step_begin", 2, sigterm)]))
    try:
        stopped.train()
        raise AssertionError("SIGTERM was not heard")
    except Unfinished as unfinished:
        assert unfinished.checkpoint == str(folder / "stopped" / "checkpoint-3"), unfinished
        assert (folder / "stopped" / "checkpoint-3" / "manifest.json").is_file()  # also where it is not written
    resumed = make_trainer(model, folder / "stopped")
    resumed.train(resume_from_checkpoint=True)
    equal = all(map(torch.equal, weights(whole.model), weights(resumed.model)))
    after = [log for log in logged(whole) if log["step"] > 3]
    found = {"equal": equal, "whole": after, "resumed": logged(resumed)}
    (folder / f"{whole.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, out, *without_torchrun = sys.argv[1:]
    for rank in without_torchrun:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    main(model_folder, Path(out))
