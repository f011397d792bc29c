"""Kill a training process again and again, resume it each time, and compare the end with an uninterrupted run.

Run as a script with a folder, a number of kills and RewardConfig's settings as JSON, on the runtime that the
environment chooses; prints how many kills there were and how many hit a save. Each run is a fork of this process,
which has imported everything but touched no device. Every third kill waits for a save to begin.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file

from trl_tpu import RewardConfig, RewardTrainer

STEPS = 12
_TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}


def train(model_folder: Path, folder: Path, settings: dict[str, Any]) -> None:
    defaults = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_steps": 2, "logging_steps": 3}
    args = RewardConfig(
        str(folder),
        **defaults | {"max_steps": STEPS, "save_total_limit": 2, "report_to": "none", "disable_tqdm": True} | settings,
    )
    trainer = RewardTrainer(str(model_folder), args, train_dataset=tiny.made_up_pairs(64))
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)


def start(model_folder: Path, folder: Path, settings: dict[str, Any]) -> int:
    if child := os.fork():
        return child
    status = 1
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
    logs = [{key: value for key, value in entry.items() if key not in _TIMES} for entry in history]
    weights = [load_file(path) for path in (last / "state").iterdir()]
    return {f"{number} {name}": part for number, parts in enumerate(weights) for name, part in parts.items()}, logs


def wait_or_kill(child: int, at: float, aside: Path, in_a_save: bool) -> int:
    """The status of a child that is killed ``at`` seconds from now, or, ``in_a_save``, when one is next under way."""
    began = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - began > at and (aside.exists() or not in_a_save):
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.001)
    return ended[1]


def main(folder: Path, wanted: int, settings: dict[str, Any]) -> None:
    model_folder, log = folder / "model", folder / "log.txt"
    tiny.save_tiny(model_folder, [text for row in tiny.made_up_pairs(16) for text in row.values()])
    began = time.monotonic()
    _, status = os.waitpid(start(model_folder, folder / "whole", settings), 0)
    assert status == 0, log.read_text()[-3000:]
    duration = time.monotonic() - began
    weights, logs = outcome(folder / "whole")
    chooser, kills, saves_hit, rounds = random.Random(0), 0, 0, 0
    while kills < wanted:
        run = folder / f"run{rounds}"
        aside, status = run / "_unfinished", signal.SIGKILL
        while status == signal.SIGKILL:
            at = chooser.uniform(0.2, 1.0) * duration if kills < wanted else float("inf")
            status = wait_or_kill(start(model_folder, run, settings), at, aside, in_a_save=kills % 3 == 0)
            kills += status == signal.SIGKILL
            saves_hit += status == signal.SIGKILL and aside.exists()
        assert status == 0, log.read_text()[-3000:]
        rounds += 1
        resumed_weights, resumed_logs = outcome(run)
        assert weights.keys() == resumed_weights.keys()
        assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
        assert logs == resumed_logs, (logs, resumed_logs)
    print(json.dumps({"kills": kills, "saves_hit": saves_hit, "rounds": rounds, "seconds_of_a_run": duration}))


def report(folder: Path, kills: int, environment: dict[str, str], **settings: Any) -> dict[str, int]:
    """What this script prints, run in an environment."""
    process = subprocess.run(
        [sys.executable, __file__, str(folder), str(kills), json.dumps(settings)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
