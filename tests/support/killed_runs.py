"""Kill a training process repeatedly, restart it each time, and compare the result with an uninterrupted run.

The script's arguments are a folder, a number of kills, and settings of RewardConfig as JSON, with "processes" for
several ranks on a mesh. The environment chooses the runtime. It prints the numbers of kills, of kills during a save
and of resumed runs. Each run is a fork of this process, which has imported everything but touched no device. Every
third kill waits for a save to begin, every fifth comes before the first step. Times count from the second step, since
earlier work such as compilation depends on the machine's load. Of several ranks one is killed first, then the others,
as torchrun does.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from math import inf
from pathlib import Path
from typing import Any

import subprocesses
import tiny
import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm
from training import untimed
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.state_dict import tensor_reader, tensors_in

STEPS = 12


class Marks(TrainerCallback):
    """Creates a file at the end of the second step, when the first one has also finished on a device."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps += 1
        if self._steps == 2:
            self._mark.touch()


def mark_of(folder: Path) -> Path:
    """Return the file that marks that steps have begun."""
    return folder.parent / f"{folder.name}-steps"


def train(model_folder: Path, folder: Path, settings: dict[str, Any]) -> None:
    defaults = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_steps": 2, "logging_steps": 3}
    args = RewardConfig(
        str(folder),
        **defaults | {"max_steps": STEPS, "save_total_limit": 2, "report_to": "none", "disable_tqdm": True} | settings,
    )
    pairs = tiny.made_up_pairs(64)
    trainer = RewardTrainer(str(model_folder), args, train_dataset=pairs, callbacks=[Marks(mark_of(folder))])
    trainer.train(resume_from_checkpoint="auto")


def start(model_folder: Path, folder: Path, settings: dict[str, Any], processes: int) -> list[int]:
    mark_of(folder).unlink(missing_ok=True)
    port = subprocesses.free_port()
    return [fork(model_folder, folder, settings, rank, processes, port) for rank in range(processes)]


def fork(model_folder: Path, folder: Path, settings: dict[str, Any], rank: int, processes: int, port: str) -> int:
    if child := os.fork():
        return child
    if processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        subprocesses.become_rank(str(rank), str(processes))
    status = 1
    torch.set_num_threads(1)  # two threads of a fork must not both recreate a pool of the parent
    try:
        with open(folder.parent / "log.txt", "a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        train(model_folder, folder, settings)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    last = folder / f"checkpoint-{STEPS}"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    logs = list(map(untimed, history))
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors_in(last / "state").items()}
    dcp.load(weights, storage_reader=tensor_reader(last / "state"), no_dist=True)
    return weights, logs


def times_of(folder: Path, began: float) -> tuple[float, float]:
    """Return the seconds of a finished run before the end of its second step, and after it."""
    second_step = mark_of(folder).stat().st_mtime
    return second_step - began, time.time() - second_step


def wait_or_kill(children: list[int], at: float, after: Path | None, aside: Path, in_a_save: bool) -> tuple[int, bool]:
    """Return the first nonzero status of children, or 0, and whether a save was in progress at the kill.

    One child is killed ``at`` seconds after the start, or after the file ``after`` exists. With ``in_a_save``, the
    kill also waits for the next save.
    """
    started, began = time.time_ns(), time.monotonic() if after is None else None
    left = set(children)
    while left:
        for child in sorted(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.remove(child)
            if status:
                return end(left, status), False
        if began is None and after is not None and after.exists():
            began = time.monotonic()
        if began is not None and time.monotonic() - began > at and (not in_a_save or begun_since(started, aside)):
            os.kill(random.choice(sorted(left or children)), signal.SIGKILL)
            return end(left, signal.SIGKILL), begun_since(started, aside)
        time.sleep(0.002)
    return 0, False


def end(children: set[int], status: int) -> int:
    """Kill the remaining children, as a launcher does, and return the status."""
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status


def begun_since(moment: int, aside: Path) -> bool:
    """Tell if a save is in progress that began after ``moment``; an older staging folder is from an earlier kill."""
    try:
        return aside.stat().st_mtime_ns > moment
    except FileNotFoundError:
        return False


def main(folder: Path, wanted: int, settings: dict[str, Any]) -> None:
    processes = settings.pop("processes", 1)
    tqdm.monitor_interval = 0  # its thread could hold its lock during a fork, and the fork would never get it
    tqdm.set_lock(threading.RLock())  # the default lock is shared by all forks, and a killed fork would keep it
    model_folder, log = folder / "model", folder / "log.txt"
    tiny.save_tiny(model_folder, tiny.made_up_pairs(16))
    began = time.time()
    whole = start(model_folder, folder / "whole", settings, processes)
    status, _ = wait_or_kill(whole, inf, None, folder / "whole" / "_unfinished", in_a_save=False)
    assert status == 0, log.read_text()[-3000:]
    before, steps = times_of(folder / "whole", began)
    weights, logs = outcome(folder / "whole")
    chooser, kills, saves_hit, resumes, rounds = random.Random(0), 0, 0, 0, 0
    while kills < wanted:
        run = folder / f"run{rounds}"
        aside, status = run / "_unfinished", signal.SIGKILL
        while status == signal.SIGKILL:
            early = kills % 5 == 4
            began, is_new = time.time(), not run.exists()
            at = chooser.uniform(0.2, 1.0) * before if early else chooser.random() * steps
            resumes += any(run.glob("checkpoint-*"))
            children, after = start(model_folder, run, settings, processes), None if early else mark_of(run)
            status, in_a_save = wait_or_kill(children, at if kills < wanted else inf, after, aside, kills % 3 == 0)
            kills += status == signal.SIGKILL
            saves_hit += in_a_save
            if is_new and status == 0:  # the uninterrupted run may have been slow
                before, steps = times_of(run, began)
        assert status == 0, log.read_text()[-3000:]
        rounds += 1
        resumed_weights, resumed_logs = outcome(run)
        assert weights.keys() == resumed_weights.keys()
        assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
        assert logs == resumed_logs, (logs, resumed_logs)
    counts = {"kills": kills, "saves_hit": saves_hit, "resumes": resumes, "rounds": rounds}
    print(json.dumps(counts | {"seconds_of_a_run": before + steps}))


def report(folder: Path, kills: int, variables: dict[str, str], **settings: Any) -> dict[str, int]:
    """Run this script with variables of the environment, and return the counts it prints."""
    done = subprocesses.run("killed_runs.py", str(folder), str(kills), json.dumps(settings), timeout=3000, **variables)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
