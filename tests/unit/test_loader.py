"""Loaders skip, seed their workers and wait for one another as transformers' and TRL's do."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers.trainer
from places import ROOT

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.data.loader import epoch_that_skips_by, host_batches, skip_batches

TWICE = """
import sys, time
from accelerate import PartialState
from trl_tpu.data.tokenize import main_processes_first

def note(text):
    with open(sys.argv[1], "a") as file:
        file.write(text)

rank = PartialState(cpu=True).process_index
with main_processes_first():
    note(f"{rank} begins, ")
    time.sleep(1 - rank)
    note(f"{rank} ends, ")
"""


def test_a_resumed_epoch_skips_by_a_function_of_ours_and_transformers_stays_as_it_is(tmp_path: Path) -> None:
    pairs = tiny.made_up_pairs(8)
    tokenizer = tiny.tiny_tokenizer([*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]])
    skipped, own = [], transformers.trainer.skip_first_batches

    def skip(loader: Any, count: int) -> Any:
        skipped.append(count)
        assert transformers.trainer.skip_first_batches is own
        return skip_batches(loader.base_dataloader, count)

    class Skipping(RewardTrainer):
        def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
            epoch_that_skips_by(skip)(self, *args, **kwargs)

    def losses(trainer: RewardTrainer, **resume: Any) -> list[float]:
        trainer.train(**resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def make(out: Path) -> RewardTrainer:
        quiet: dict[str, Any] = {"report_to": "none", "bf16": False, "logging_steps": 1, "disable_tqdm": True}
        args = RewardConfig(str(out), per_device_train_batch_size=2, num_train_epochs=1, save_steps=2, **quiet)
        model = tiny.tiny_model(tokenizer)
        return Skipping(model, args, train_dataset=pairs, processing_class=tokenizer)

    whole = losses(make(tmp_path))
    assert len(whole) == 4 and not skipped
    assert losses(make(tmp_path), resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == pytest.approx(whole)
    assert skipped == [2]


class Draws(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return random.random()


def test_workers_draw_by_the_seed_and_by_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = RewardConfig(str(tmp_path), report_to="none", bf16=False, dataloader_num_workers=2)

    def drawn(rank: int) -> list[Any]:
        monkeypatch.setattr(RewardConfig, "process_index", property(lambda _: rank))
        transformers.set_seed(0)
        return list(host_batches(Draws(range(8)), list, 2, range(8), args))  # type: ignore[arg-type]

    assert drawn(0) == drawn(0) != drawn(1)


def test_the_main_process_tokenizes_first(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    base = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "USE_TORCH_XLA": "0"}
    command = [sys.executable, "-c", TWICE, str(tmp_path / "order")]
    started = [
        subprocess.Popen(command, env=base | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)})
        for rank in ("0", "1")
    ]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert (tmp_path / "order").read_text() == "0 begins, 0 ends, 1 begins, 1 ends, "
