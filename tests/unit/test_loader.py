"""Loaders seed their workers, and processes wait for each other as in transformers and TRL."""

import random
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import torch
import transformers
from torch.utils.data import DataLoader

from trl_tpu import RewardConfig
from trl_tpu.data.loader import host_batches
from trl_tpu.runtime import Runtime

TWICE = """
import sys, time, subprocesses
subprocesses.become_rank(sys.argv[2], "2")
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


class Draws(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return random.random()


def test_loader_workers_of_all_hosts_use_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = RewardConfig(str(tmp_path), report_to="none", bf16=False, dataloader_num_workers=2)

    def drawn(rank: int, seed: int = 0) -> list[Any]:
        monkeypatch.setattr(RewardConfig, "process_index", property(lambda _: rank))
        transformers.set_seed(seed)
        return list(host_batches(Draws(range(8)), list, 2, range(8), args))  # type: ignore[arg-type]

    assert drawn(0) == drawn(1) != drawn(0, seed=1)


def test_plain_torch_loader_moves_batches_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "device", torch.device("meta"))
    host: Any = [{"input_ids": torch.ones(2), "text": "as it is"}]
    (batch,) = Runtime().loader(DataLoader(host, batch_size=None), ())
    assert batch["input_ids"].is_meta and batch["text"] == "as it is"


def test_main_process_tokenizes_first(tmp_path: Path) -> None:
    subprocesses.run_ranks(*[("-c", TWICE, str(tmp_path / "order"), rank) for rank in "01"], USE_TORCH_XLA="0")
    assert (tmp_path / "order").read_text() == "0 begins, 0 ends, 1 begins, 1 ends, "
