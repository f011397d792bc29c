"""One of COUNT processes: ranks.py MODEL FOLDER COUNT [RANK]

It trains in every way listed for COUNT processes, with the same pairs per batch, and writes the results to FOLDER. One
and two processes also create new weights for a language model in FOLDER, if there is one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import patch_environment
from peft import LoraConfig
from subprocesses import become_rank
from training import QUIET, logged, trained
from transformers import AutoModelForSequenceClassification, TrainerCallback
from transformers.distributed import DistributedConfig

from trl_tpu.errors import UserError
from trl_tpu.runtime import Runtime, choice, current, replace

SETTINGS: dict[str, Any] = QUIET | {"max_steps": 8, "total_batch_size": 8, "per_device_eval_batch_size": 1}
SETTINGS |= {"logging_steps": 1, "learning_rate": 1e-4, "save_strategy": "no", "eval_strategy": "epoch"}
SETTINGS |= {"max_grad_norm": 0.5}  # below the actual norms
LORA: dict[str, Any] = {"task_type": "SEQ_CLS", "r": 4, "target_modules": ["q_proj", "up_proj"]}
#: Ways to train by name: number of processes, the equivalent way of one process, and the mesh. TorchTPU uses only
#: those whose names begin with "planned".
WAYS: dict[str, tuple[int, str, str | None]] = {
    "fsdp=2": (2, "plain", "fsdp=2"),
    "padded": (2, "padded", "fsdp=2"),
    "bf16": (2, "bf16", "fsdp=2"),
    "adapters": (2, "adapters", "fsdp=2"),
    "loaded on a mesh": (2, "plain", None),
    "launched with FSDP2": (2, "plain", None),
    "launched with FSDP1": (2, "adapters", None),
    "launched with tensor=2": (2, "plain", None),
    "fsdp": (2, "plain", None),
    "parallelism_config": (2, "adapters", None),
    "not finite": (2, "not finite", "fsdp=2"),
    "planned": (2, "plain", None),
    "planned, padded": (2, "padded", "fsdp=2"),
    "accumulated, planned": (2, "accumulated", "data=2"),
    "ranked": (2, "ranked", "fsdp=2"),
    "attributes": (2, "attributes", "fsdp=2"),
    "recurrent": (2, "kimi_linear", "fsdp=2"),
    "multimodal": (2, "gemma4", "fsdp=2"),
    "without a plan": (2, "gpt2", "fsdp=2"),
    "steps": (2, "steps", "data=2"),
    "steps, planned": (2, "steps", "fsdp=2"),
    "data=4": (4, "plain", "data=4"),
    "data=2,fsdp=2": (4, "accumulated", "data=2,fsdp=2"),
    "fsdp=2,tensor=2": (4, "plain", "fsdp=2,tensor=2"),
    "fsdp=8": (8, "plain", "fsdp=8"),
    "data=2,fsdp=4": (8, "plain", "data=2,fsdp=4"),
    "data=4,fsdp=2": (8, "plain", "data=4,fsdp=2"),
}

ON_GPU = torch.cuda.is_available()
if ON_GPU:  # processes share it: each is alone on its host, as its variables say, and gloo carries the tensors
    WAYS = {name: WAYS[name] for name in ("fsdp=2", "padded", "bf16", "adapters")}
    SETTINGS |= {"ddp_backend": "gloo"}

_FSDP = {
    **{"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"},
    **{"FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true"},
}
#: Variables that `accelerate launch` sets for its configs.
LAUNCHED = {
    **{f"launched with FSDP{version}": _FSDP | {"FSDP_VERSION": version} for version in "12"},
    "launched with tensor=2": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
}
#: Settings that ask accelerate to shard.
SHARDING = {"fsdp": "full_shard", "parallelism_config": ParallelismConfig(dp_shard_size=2)}

#: Families of models that are loaded by name, from folders of these names.
FAMILIES = ("kimi_linear", "gemma4", "gpt2")


class Planning(Runtime):
    """Plain torch with planned shapes, like TorchTPU."""

    plans_shapes = True


class Infinite(TrainerCallback):
    """Makes the first process's shard of a weight infinite for the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in (2, 3) and args.process_index == 0:
            weight = model.score.weight.data
            local = getattr(weight, "_local_tensor", weight)
            self.kept = local.clone() if state.global_step == 2 else self.kept
            local.copy_(torch.full_like(local, float("inf")) if state.global_step == 2 else self.kept)


def train(
    model: str, out: Path, way: str, mesh: str | None = None, loaded_on: Any = None, **more: Any
) -> dict[str, Any]:
    """Train two epochs, whose last batches are short, and evaluate after each."""
    from label_formats import format_in  # imports trainers, which choose the device: RANK must be known

    form = format_in(way)
    pairs = form.rows(39)
    train_pairs: Any = pairs.select(range(26))
    settings = SETTINGS | form.settings | {"mesh": mesh, "use_cpu": not (ON_GPU or current().plans_shapes)} | more
    arguments: dict[str, Any] = {"model": form.model(model), "eval_dataset": pairs.select(range(26, 39))}
    if way == "accumulated":  # an epoch's last batch is an update of its own
        settings |= {"gradient_accumulation_steps": 2, "remat": "dots", "max_steps": 4}
        train_pairs = train_pairs.to_iterable_dataset(num_shards=3)
    settings |= {"packing": False} if "padded" in way else {"bf16": True} if way == "bf16" else {}
    settings |= {"average_over": "comparisons"} if way == "ranked" else {}
    if way == "adapters":
        settings |= {"log_grad_norms": True}
        arguments["peft_config"] = LoraConfig(**LORA)
    if way in FAMILIES:  # loaded by name; recurrent layers recomputed in the backward read the packed rows again
        settings |= {"remat": "dots", "packing": True}
        arguments["model"] = str(out.parent / way)
    if way == "not finite":
        arguments["callbacks"] = [Infinite()]
    if loaded_on is not None:
        arguments["model"] = AutoModelForSequenceClassification.from_pretrained(model, distributed_config=loaded_on)
    trainer = trained(form.trainer(args=form.config(str(out), **settings), train_dataset=train_pairs, **arguments))
    return {
        "described": trainer.describe(),
        "logged": logged(trainer),
        "predictions": trainer.predict(pairs.select(range(5))).predictions.tolist(),  # type: ignore[union-attr]
    }


def compare_own_loop(model: str, out: Path) -> None:
    """Compare a custom loop with the trainer, on a replicated and on a sharded model."""
    from own_loop import compare

    from trl_tpu import RewardConfig

    def config(**settings: Any) -> RewardConfig:
        batches = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "save_strategy": "no"}
        return RewardConfig(**QUIET | batches | {"use_cpu": True} | settings)

    replace(Runtime())
    for mesh in (None, "fsdp=2"):
        compare(config, model, out / str(mesh), mesh=mesh, gradient_accumulation_steps=2)


def new_weights(model: str, out: Path, way: str, mesh: str | None) -> dict[str, Any]:
    """Return the unsharded weights that a trainer adds to a named language model."""
    from label_formats import format_in

    form = format_in(way)
    settings = {"mesh": mesh, "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1, "seed": 7}
    peft_config = LoraConfig(**LORA) if way == "adapters" else None
    args = form.config(str(out), **settings | form.settings)
    trainer = form.trainer(model=model, args=args, train_dataset=form.rows(8), peft_config=peft_config)
    new = {name: each for name, each in trainer.model.named_parameters() if "score" in name or "lora" in name}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in new.items()}
    return {name: each.tolist() for name, each in whole.items()} | {"next": torch.rand(1).item()}


def main(model: str, folder: Path, count: int) -> None:
    rank = os.environ.get("RANK", "alone")
    if count == 1:
        ways = {way for _, way, _ in WAYS.values() if way not in FAMILIES or (folder / way).is_dir()}
        found = {way: train(model, folder / f"alone {way}", way) for way in ways}
    else:
        found = {}
        for name, (processes, way, mesh) in WAYS.items():
            if processes == count and (name.startswith("planned") or choice().name == "native"):
                if choice().name == "native":
                    replace(Planning() if "planned" in name else Runtime())
                loaded_on = DistributedConfig(fsdp_size=2) if name == "loaded on a mesh" else None
                settings = {name: SHARDING[name]} if name in SHARDING else {}
                with patch_environment(**LAUNCHED.get(name, {})):
                    found[name] = train(model, folder / name, way, mesh, loaded_on, **settings)
    if count <= 2 and (folder / "causal").is_dir() and not ON_GPU:
        mesh = None if count == 1 else "fsdp=2"
        ways = {"plain": "causal", "adapters": "causal", "steps": "causal", "value head": "value head"}
        if count == 2:
            compare_own_loop(model, folder / "own loop")
        found["new"] = {
            way: new_weights(str(folder / name), folder / "new" / way, way, mesh) for way, name in ways.items()
        }
    if count == 4:
        two_cuts = DistributedConfig(fsdp_size=2, tp_size=2)
        replace(Runtime())
        for name, mesh, loaded_on in (("tensor=4", "tensor=4", None), ("two cuts", "fsdp=2,tensor=2", two_cuts)):
            try:
                found[name] = train(model, folder / name, "plain", mesh, loaded_on)
            except UserError as error:
                found[name] = {"rejected": str(error)}
    (folder / f"{rank} of {count}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, out, processes, *ranks = sys.argv[1:]
    for each in ranks:
        become_rank(each, processes)
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if ON_GPU else {}
        if choice().name == "native" and not ON_GPU:
            os.environ["ACCELERATE_USE_CPU"] = "1"  # `use_cpu` is rejected if shapes are planned
    main(model_folder, Path(out), int(processes))
