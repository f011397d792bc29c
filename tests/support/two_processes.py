"""One of two processes of plain torch: two_processes.py MODEL FOLDER [RANK]

With RANK it tells itself what torchrun would tell it.

Train without a stop; then with one, in the middle between two logs, after which training goes on from the checkpoint.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from apart import become_rank
from stopping import At, sigterm
from training import logged, trained, untimed
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.manifest import find_faults
from trl_tpu.checkpoint.run_folder import RemoteRun
from trl_tpu.errors import UserError
from trl_tpu.training import stopping as agreement
from trl_tpu.training.stopping import Unfinished

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "total_batch_size": 4,
    "per_device_eval_batch_size": 2,
    "max_eval_steps": 2,
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


def make_trainer(model: str, folder: Path | str, *callbacks: TrainerCallback, **settings: Any) -> RewardTrainer:
    pairs = tiny.made_up_pairs(64)
    args = RewardConfig(str(folder), **SETTINGS | settings)
    return RewardTrainer(
        model, args, train_dataset=pairs, eval_dataset=pairs.select(range(16)), callbacks=list(callbacks)
    )


def evaluated(model: str, folder: Path) -> dict[str, float]:
    """Of 13 pairs, whose last batch one of two processes fills up with others; without times."""
    trainer = make_trainer(
        model, folder, center_rewards_coefficient=0.1, per_device_eval_batch_size=4, max_eval_steps=None
    )
    return untimed(trainer.evaluate(tiny.made_up_pairs(13, seed=7, margin=True)))


def check_a_stop_where_nothing_is_due(model: str, folder: Path, told: bool) -> None:
    """Both stop at one step, and save it alone; they meet at every step."""
    agreement._SECONDS_BETWEEN = 0.0
    callbacks = [At("on_step_begin", 1, sigterm)] if told else []
    settings = {"save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no"}
    try:
        make_trainer(model, folder, *callbacks, **settings).train()
        raise AssertionError("SIGTERM was not heard")
    except Unfinished as unfinished:
        assert unfinished.checkpoint == str(folder / "checkpoint-2"), unfinished
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]


def check_a_run_at_a_url(model: str, url: str, first: bool) -> None:
    """Each process goes on with random numbers of its own, so that all of them are there.

    One process that cannot write its own fails the save of both. When the run is resumed, one downloads for both.
    """
    settings: dict[str, Any] = {"save_steps": 1, "eval_strategy": "no"}
    trainer = make_trainer(model, url, max_steps=2, **settings)
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
    resumed = trained(make_trainer(model, url, max_steps=3, **settings), resume=True)
    assert resumed.state.global_step == 3
    assert [Path(each).name for each in downloads] == (["checkpoint-9", "checkpoint-2"] if first else []), downloads
    try:
        make_trainer(model, url, **settings).train(resume_from_checkpoint=f"{url}/checkpoint-7")
        raise AssertionError("there is no checkpoint-7")
    except (UserError, OSError) as error:
        assert "checkpoint-7" in str(error), error


def main(model: str, folder: Path) -> None:
    of_13_pairs = evaluated(model, folder / "evaluated")
    whole = trained(make_trainer(model, folder / "whole"))
    first = whole.args.process_index == 0
    # the other process alone is told to stop, before an evaluation, which is left out
    stopped = make_trainer(model, folder / "stopped", *([] if first else [At("on_step_begin", 2, sigterm)]))
    try:
        stopped.train()
        raise AssertionError("SIGTERM was not heard")
    except Unfinished as unfinished:
        assert unfinished.checkpoint == str(folder / "stopped" / "checkpoint-3"), unfinished
        assert (folder / "stopped" / "checkpoint-3" / "manifest.json").is_file()  # also where it is not written
    resumed = trained(make_trainer(model, folder / "stopped"), resume=True)
    check_a_stop_where_nothing_is_due(model, folder / "quiet", told=not first)
    check_a_run_at_a_url(model, f"file://{folder}/url", first)
    equal = all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    after = [log for log in logged(whole) if log["step"] > 3]
    found = {"equal": equal, "whole": after, "resumed": logged(resumed), "evaluated": of_13_pairs}
    (folder / f"{whole.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder, out, *without_torchrun = sys.argv[1:]
    for rank in without_torchrun:
        become_rank(rank, "2")
    main(model_folder, Path(out))
