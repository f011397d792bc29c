"""One of COUNT processes with a mesh, or one alone: fresh_ranks.py MODEL FOLDER COUNT [RANK]

It makes trainers of a causal language model by its name, and writes the weights that are new to FOLDER.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig

WAYS = ("plain", "adapters", "steps")


def new_weights(model: str, out: Path, way: str, mesh: str | None) -> dict[str, Any]:
    """Return the new weights of a model, each whole."""
    from judgements import form_in  # imports the trainers: not before RANK is known

    form = form_in(way)
    settings = {"mesh": mesh, "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1, "seed": 7}
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "up_proj"]) if way == "adapters" else None
    args = form.config(str(out), **settings | form.settings)
    trainer = form.trainer(model=model, args=args, train_dataset=form.rows(8), peft_config=lora)
    new = {name: each for name, each in trainer.model.named_parameters() if "score" in name or "lora" in name}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in new.items()}
    return {name: each.tolist() for name, each in whole.items()} | {"next": torch.rand(1).item()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, out, count, *rank = sys.argv[1:]
    for each in rank:
        os.environ |= {"RANK": each, "LOCAL_RANK": each, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ["ACCELERATE_USE_CPU"] = "1"
    mesh = f"fsdp={count}" if rank else None
    found = {way: new_weights(model_folder, Path(out, way), way, mesh) for way in WAYS}
    Path(out, f"fresh {'-'.join(rank) or 'alone'}.json").write_text(json.dumps(found))
    PartialState().destroy_process_group()  # if there is one
