"""Kill a training process again and again, resume it each time, and compare the end with an uninterrupted run.

Run as a script with a folder and a number of kills; prints how many kills there were and how many hit a save. Each run
is a fork of this process, which has imported everything but trained nothing.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file

from trl_tpu import RewardConfig, RewardTrainer

STEPS = 12
_TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}


def train(model_folder: Path, folder: Path) -> None:
    args = RewardConfig(
        str(folder), max_steps=STEPS, save_steps=2, logging_steps=3, save_total_limit=2, report_to="none",
        per_device_train_batch_size=2, learning_rate=1e-3, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = RewardTrainer(str(model_folder), args, train_dataset=tiny.made_up_pairs(16))
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)


def start(model_folder: Path, folder: Path) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        with open(folder.parent / "log.txt", "a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        train(model_folder, folder)
        status = 0
    finally:
        os._exit(status)


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    last = folder / f"checkpoint-{STEPS}"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    logs = [{key: value for key, value in entry.items() if key not in _TIMES} for entry in history]
    return load_file(last / "model.safetensors"), logs


def main(folder: Path, wanted: int) -> None:
    model_folder = folder / "model"
    tiny.save_tiny(model_folder, [text for row in tiny.made_up_pairs(16) for text in row.values()])
    began = time.monotonic()
    _, status = os.waitpid(start(model_folder, folder / "whole"), 0)
    assert status == 0, (folder / "log.txt").read_text()[-3000:]
    duration = time.monotonic() - began
    weights, logs = outcome(folder / "whole")
    chooser, kills, saves_hit, rounds = random.Random(0), 0, 0, 0
    while kills < wanted or rounds == 0:
        run, done = folder / f"run{rounds}", False
        while not done:
            child = start(model_folder, run)
            if kills < wanted:
                time.sleep(chooser.uniform(0.2, 1.0) * duration)
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            done = status == 0
            if status == signal.SIGKILL:
                kills += 1
                saves_hit += (run / ".unfinished").exists()
            assert status in (0, signal.SIGKILL), (folder / "log.txt").read_text()[-3000:]
        rounds += 1
        resumed_weights, resumed_logs = outcome(run)
        assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
        assert logs == resumed_logs, (logs, resumed_logs)
    print(json.dumps({"kills": kills, "saves_hit": saves_hit, "rounds": rounds, "seconds_of_a_run": duration}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
