"""Two processes on TorchTPU train as one process on the CPU does, and resume bitwise.

The CPU plugin supports one process. Each process therefore has its own, and collectives go over gloo: see
`torchtpu_device`.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
from environment import SUPPORT

COUNT = 2


def run_all(script: str, *words: str) -> None:
    """Run a script with these words, the number of processes and the rank, in each process."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": subprocesses.free_port()}
    command = (str(SUPPORT / "torchtpu_device.py"), script, *words, str(COUNT))
    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(lambda rank: subprocesses.run_without_server(*command, str(rank), **meet), range(COUNT)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = tiny.made_up_pairs(64)
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), pairs)


def test_processes_equal_one_process(model: str, tmp_path: Path) -> None:
    subprocesses.run_without_server(str(SUPPORT / "ranks.py"), model, str(tmp_path), "1", ACCELERATE_USE_CPU="1")
    run_all("ranks.py", model, str(tmp_path))
    alone = json.loads((tmp_path / "alone of 1.json").read_text())
    for rank in range(COUNT):
        found = json.loads((tmp_path / f"{rank} of {COUNT}.json").read_text())
        for way, one in {"planned": alone["plain"], "planned, padded": alone["padded"]}.items():
            assert f"Training on {COUNT} processes, each on TPU through TorchTPU" in found[way]["described"]
            for name in ("loss", "eval_loss", "grad_norm", "mean_reward", "eval_accuracy", "num_tokens"):
                assert logged(found[way], name) == pytest.approx(logged(one, name), rel=0, abs=1e-6)
            assert logged(found[way], "loss")
            for ours, reference in zip(found[way]["predictions"], one["predictions"], strict=True):
                assert ours == pytest.approx(reference, rel=0, abs=1e-6)


def logged(run: dict[str, Any], name: str) -> list[float]:
    return [logs[name] for logs in run["logged"] if name in logs]


def test_resumed_run_is_bitwise_equal(model: str, tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path / "whole"), "mesh": f"fsdp={COUNT}", "max_steps": 4}
    run_all("saved_ranks.py", model, json.dumps(settings))
    resumed = {"output_dir": str(tmp_path / "resumed"), "resume": str(tmp_path / "whole" / "checkpoint-2")}
    run_all("saved_ranks.py", model, json.dumps(settings | resumed))
    for name in ("model.safetensors", *(f"{rank}.json" for rank in range(COUNT))):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
