"""One of two processes of plain torch, or a single one: two_processes.py MODEL FOLDER [RANK]

With RANK it sets torchrun's environment variables itself. It trains in every way, with the same pairs per batch for
one or two processes, and writes the results to FOLDER. Two processes also compare with TRL, stop at a time limit, and
save at a URL.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from datasets import Dataset
from label_formats import format_in
from subprocesses import become_rank
from training import QUIET, At, advance_clock, logged, losses, sigterm, trained, untimed

import trl_tpu
from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.folders import RemoteRun, find_faults
from trl_tpu.errors import UserError
from trl_tpu.training import stopping
from trl_tpu.training.stopping import Unfinished

COMMON = QUIET | {"max_steps": 6, "learning_rate": 1e-3, "use_cpu": True}
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
    "streams": (lambda pairs: pairs.to_iterable_dataset(), {"logging_steps": 2}),  # also logs within epochs
    # files of unequal lengths, which accelerate would distribute, shuffled in each epoch
    "padded streams": (
        lambda pairs: pairs.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=5),
        {"packing": False},
    ),
}


def arguments(package: Any, out: Path, **settings: Any) -> Any:
    each = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    batch = {"per_device_train_batch_size": each, "per_device_eval_batch_size": each}
    return package.RewardConfig(str(out), **batch | COMMON | {"logging_steps": 1, "optim": "adamw_torch"} | settings)


def go(model: str, out: Path, way: str) -> dict[str, Any]:
    """Train two epochs of three steps with evaluations, repeat from a checkpoint within an epoch, and predict."""
    shape, settings = WAYS[way]
    form = format_in(way)
    pairs = form.rows(44)
    train, held_out, test = (shape(pairs.select(rows)) for rows in (range(24), range(24, 37), range(37, 44)))

    def make() -> RewardTrainer:
        more = {"gradient_accumulation_steps": 2, "save_steps": 2, "eval_strategy": "epoch"}
        args = arguments(trl_tpu, out, **more, **settings, **form.settings)
        return RewardTrainer(form.model(model), args, train_dataset=train, eval_dataset=held_out)

    whole, resumed = make(), make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(out / f"checkpoint-{4 if way == 'grouped' else 2}"))
    predicted = resumed.predict(test)
    found = {"packed": whole.batch_plan.padding_reason is None, "logged": logged(whole), "resumed": logged(resumed)}
    predictions: Any = predicted.predictions
    return found | {"test": untimed(predicted.metrics or {}), "predictions": predictions.tolist()}


def of_13_pairs(package: Any, model: str, out: Path) -> list[float]:
    """Train on 13 pairs, so that the last batch of an epoch is short, and return the losses."""
    args = arguments(package, out, save_strategy="no")
    trainer = trained(package.RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(13)))
    return losses(trainer)


def after_a_time_limit(model: str, out: Path, told: bool) -> str:
    """Stop by a time limit, optionally followed by a SIGTERM, and return the reason why training ended."""
    args = arguments(trl_tpu, out, training_time_limit="1h", save_strategy="no")
    trainer = RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(24))
    trainer.add_callback(At("on_train_end", 0, sigterm if told else lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        trainer.add_callback(At("on_step_begin", 1, advance_clock(patch, 3600)))
        try:
            trainer.train()
        except Unfinished as unfinished:
            return unfinished.reason
    return "stopped by " + str(trainer.stopped_by)


def told_to_stop(model: str, out: Path, told: bool) -> str:
    """Send a SIGTERM in a run that votes at every step and in which nothing else is due; return the checkpoint."""
    args = arguments(trl_tpu, out, save_strategy="no", logging_strategy="no")
    callbacks: list[Any] = [At("on_step_begin", 1, sigterm)] if told else []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Unfinished) as stop:
        patch.setattr(stopping, "_SECONDS_BETWEEN_VOTES", 0.0)
        RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(24), callbacks=callbacks).train()
    return Path(stop.value.checkpoint).name


def check_a_run_at_a_url(model: str, url: str, first: bool) -> None:
    """Each process has its own random state, so the checkpoint must hold all of them.

    A process that cannot write its state fails the save of both. In a resume, one process downloads for both.
    """

    def make(max_steps: int = 6) -> RewardTrainer:
        args = RewardConfig(url, **COMMON | {"max_steps": max_steps, "total_batch_size": 4, "save_steps": 1})
        return RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(64))

    trainer = make(2)
    save_rng_state: Any = trainer._save_rng_state

    def full(folder: str) -> None:
        if not first and trainer.state.global_step == 1:
            raise OSError("no space left on device")
        save_rng_state(folder)

    trainer._save_rng_state = full  # type: ignore[method-assign]
    trainer.train()
    assert trainer.checkpointer.failed == [f"{url}/checkpoint-1"], trainer.checkpointer.failed
    there = Path(url.removeprefix("file://"), "checkpoint-2")
    assert {path.name for path in there.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert find_faults(there) == []
    if first:
        damaged = Path(shutil.copytree(there, there.with_name("checkpoint-9")))
        (damaged / "config.json").write_text("{}")
    trainer.accelerator.wait_for_everyone()
    downloads, get = [], RemoteRun.get
    RemoteRun.get = lambda self, folder: downloads.append(self.url) or get(self, folder)  # type: ignore[func-returns-value, method-assign]
    resumed = trained(make(3), resume=True)
    assert resumed.state.global_step == 3
    assert [Path(each).name for each in downloads] == (["checkpoint-9", "checkpoint-2"] if first else []), downloads
    try:
        make().train(resume_from_checkpoint=f"{url}/checkpoint-7")
        raise AssertionError("checkpoint-7 does not exist")
    except (UserError, OSError) as error:
        assert "checkpoint-7" in str(error), error


def main(model: str, folder: Path) -> None:
    rank = os.environ.get("RANK", "alone")
    found: dict[str, Any] = {way: go(model, folder / way, way) for way in WAYS}
    if rank != "alone":
        found |= {package.__name__: of_13_pairs(package, model, folder / "13") for package in (trl, trl_tpu)}
        found["a time limit"] = after_a_time_limit(model, folder / "limit", told=False)
        found["a time limit and a SIGTERM"] = after_a_time_limit(model, folder / "both", told=rank == "1")
        found["a SIGTERM alone"] = told_to_stop(model, folder / "alone", told=rank == "1")
        check_a_run_at_a_url(model, f"file://{folder}/url", first=rank == "0")
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, out, *without_torchrun = sys.argv[1:]
    for each in without_torchrun:
        become_rank(each, "2")
    main(model_folder, Path(out))
