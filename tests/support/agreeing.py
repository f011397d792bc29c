"""One of two processes of plain torch, or one alone: agreeing.py MODEL FOLDER [RANK]

Each way to train is gone with the same pairs in a batch, however many processes share it, and what it gave is written
to FOLDER. Two processes also train as TRL, and are stopped.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from apart import become_rank
from datasets import Dataset
from judgements import form_in
from stopping import At, later, sigterm
from training import logged, losses, trained, untimed

import trl_tpu
from trl_tpu.training.stopping import Unfinished

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "optim": "adamw_torch",
}
WAYS: dict[str, tuple[Callable[[Dataset], Any], dict[str, Any]]] = {
    "eager": (lambda pairs: pairs, {"model_init_kwargs": {"attn_implementation": "eager"}}),
    "padded": (
        lambda pairs: pairs,
        {"packing": False, "accelerator_config": {"even_batches": False, "dispatch_batches": True}},
    ),
    "grouped": (
        lambda pairs: pairs.map(lambda _, row: {"prompt": f"Count on from {row % 7}:"}, with_indices=True),
        {"group_by_prompt": True},
    ),
    "attributes": (lambda rows: rows, {}),
    "streams": (lambda pairs: pairs.to_iterable_dataset(), {"logging_steps": 2}),  # not at the end of an epoch
    # files of unequal lengths, which accelerate would deal out; in epochs of other orders
    "padded streams": (
        lambda pairs: pairs.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=5),
        {"packing": False},
    ),
}


def arguments(package: Any, out: Path, **settings: Any) -> Any:
    each = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    batch = {"per_device_train_batch_size": each, "per_device_eval_batch_size": each}
    return package.RewardConfig(str(out), **batch | SETTINGS | settings)


def go(model: str, out: Path, way: str) -> dict[str, Any]:
    """Train two epochs of three steps and evaluate after each, once more from within one of them; and predict."""
    shape, settings = WAYS[way]
    form = form_in(way)
    pairs = form.rows(44)
    train, held_out, test = (shape(pairs.select(rows)) for rows in (range(24), range(24, 37), range(37, 44)))

    def make() -> trl_tpu.RewardTrainer:
        more = {"gradient_accumulation_steps": 2, "save_steps": 2, "eval_strategy": "epoch"}
        args = arguments(trl_tpu, out, **more, **settings, **form.settings)
        return trl_tpu.RewardTrainer(form.model(model), args, train_dataset=train, eval_dataset=held_out)

    whole, resumed = make(), make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(out / f"checkpoint-{4 if way == 'grouped' else 2}"))
    predicted = resumed.predict(test)
    return {
        "packed": whole.batch_plan.packed,
        "logged": logged(whole),
        "resumed": logged(resumed),
        "test": untimed(predicted.metrics or {}),
        "predictions": predicted.predictions.tolist(),  # type: ignore[union-attr]
    }


def of_13_pairs(package: Any, model: str, out: Path) -> list[float]:
    """Train 13 pairs, of which the last batch of an epoch has too few."""
    args = arguments(package, out, save_strategy="no")
    trainer = trained(package.RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(13)))
    return losses(trainer)


def after_a_time_limit(model: str, out: Path, told: bool) -> str:
    """Stop by a time limit, whereupon this process may be told to end; return how training ended."""
    args = arguments(trl_tpu, out, training_time_limit="1h", save_strategy="no")
    trainer = trl_tpu.RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(24))
    trainer.add_callback(At("on_train_end", 0, sigterm if told else lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        trainer.add_callback(At("on_step_begin", 1, later(patch, 3600)))
        try:
            trainer.train()
        except Unfinished as unfinished:
            return unfinished.reason
    return "stopped by " + str(trainer.stopped_by)


def main(model: str, folder: Path) -> None:
    rank = os.environ.get("RANK", "alone")
    found: dict[str, Any] = {way: go(model, folder / way, way) for way in WAYS}
    if rank != "alone":
        found |= {package.__name__: of_13_pairs(package, model, folder / "13") for package in (trl, trl_tpu)}
        found["a time limit"] = after_a_time_limit(model, folder / "limit", told=False)
        found["a time limit and a SIGTERM"] = after_a_time_limit(model, folder / "both", told=rank == "1")
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, out, *ranks = sys.argv[1:]
    for each in ranks:
        become_rank(each, "2")
    main(model_folder, Path(out))
