"""One of several processes of plain torch, one alone, or one of a mesh of XLA: ranks.py MODEL FOLDER COUNT [RANK]

Each way to train that COUNT processes go is gone with the same pairs in a batch, and what it gave written to FOLDER.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from timings import untimed

import trl_tpu

SETTINGS: dict[str, Any] = {
    "max_steps": 8,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,  # below the norms that there are
    "save_strategy": "no",
    "eval_strategy": "epoch",
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
#: Ways to train by name: the processes that go them, and their settings. `data` and `fsdp` make 2, 4 or 8.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"mesh": "fsdp=2"}),
    "padded": (2, {"mesh": "fsdp=2", "packing": False}),
    "ddp": (2, {}),
    "data": (4, {"mesh": "data=4"}),
    "both": (4, {"mesh": "data=2,fsdp=2"}),
    "fsdp of 8": (8, {"mesh": "fsdp=8"}),
    "data of 2": (8, {"mesh": "data=2,fsdp=4"}),
    "data of 4": (8, {"mesh": "data=4,fsdp=2"}),
}


def train(model: Any, out: Path, settings: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Train two epochs, whose last batches are short, and evaluate after each."""
    pairs = tiny.made_up_pairs(39)
    args = trl_tpu.RewardConfig(
        str(out), **{"total_batch_size": 8, "per_device_eval_batch_size": 1} | SETTINGS | settings
    )
    trainer = trl_tpu.RewardTrainer(
        model, args, train_dataset=pairs.select(range(26)), eval_dataset=pairs.select(range(26, 39)), **arguments
    )
    trainer.train()
    logged = [log for log in map(untimed, trainer.state.log_history) if "train_loss" not in log]
    predicted = trainer.predict(pairs.select(range(5)))
    return {
        "logged": logged,
        "described": trainer.describe(),
        "predictions": predicted.predictions.tolist(),  # type: ignore[union-attr]
    }


def main(model: str, folder: Path, count: int) -> None:
    rank = os.environ.get("RANK", "alone")
    found = {}
    if count == 1:
        found["one"] = train(model, folder / "one", {"mesh": os.environ.get("MESH")})
    for way, (processes, settings) in WAYS.items():
        if processes == count:
            found[way] = train(model, folder / way, settings)
    (folder / f"{rank} of {count}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, out, processes, *ranks = sys.argv[1:]
    for each in ranks:
        os.environ |= {"RANK": each, "LOCAL_RANK": each, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    main(model_folder, Path(out), int(processes))
