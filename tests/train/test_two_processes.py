"""Processes of plain torch led by accelerate train, stop at a time limit, save at a URL and resume together.

`test_ranks_checkpoints.py` preempts and resumes them, and compares with one process.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import two_processes


@pytest.fixture(scope="module")
def folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of one process and of two processes."""
    folder = tmp_path_factory.mktemp("runs")
    words = ("two_processes.py", model_folder, str(folder))
    subprocesses.run(*words, USE_TORCH_XLA="0")
    subprocesses.run_ranks(*((*words, rank) for rank in "01"), USE_TORCH_XLA="0")
    return folder


@pytest.fixture(scope="module")
def process_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of a single process, followed by those of each of two processes."""
    return [json.loads((folder / f"{name}.json").read_text()) for name in ("alone", "0", "1")]


@pytest.mark.parametrize("way", two_processes.WAYS)
def test_two_processes_equal_one_process(process_results: list[dict[str, Any]], way: str) -> None:
    one, *two = (found[way] for found in process_results)
    assert one["packed"] == ("padded" not in way)
    assert [log["step"] for log in one["logged"] if "eval_loss" in log] == [3, 6]
    for found in two:
        assert equal(found, one) and equal(found["resumed"], one["logged"])


def test_last_training_batch_is_completed_as_in_trl(process_results: list[dict[str, Any]]) -> None:
    for found in process_results[1:]:
        assert found["trl_tpu"] == pytest.approx(found["trl"], abs=1e-6)


def test_two_processes_end_equally(process_results: list[dict[str, Any]]) -> None:
    for found in process_results[1:]:
        assert found["a time limit"] == "stopped by training_time_limit"
        assert found["a time limit and a SIGTERM"] == "SIGTERM"
        assert found["a SIGTERM alone"] == "checkpoint-2"


@pytest.mark.long
def test_torchrun_starts_both(process_results: list[dict[str, Any]], model_folder: str, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    script, variables = two_processes.__file__, {"USE_TORCH_XLA": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocesses.run_without_server(*launcher, script, model_folder, str(tmp_path), **variables)
    for rank, started_by_hand in enumerate(process_results[1:]):
        assert equal(json.loads((tmp_path / f"{rank}.json").read_text())["eager"], started_by_hand["eager"])


def equal(ours: Any, reference: Any) -> bool:
    """Compare results from JSON: rewards and losses to 1e-6, norms to 1e-5."""
    if isinstance(reference, dict):
        return ours.keys() == reference.keys() and all(equal(ours[key], reference[key]) for key in reference)
    if isinstance(reference, list):
        return len(ours) == len(reference) and all(map(equal, ours, reference))
    return math.isclose(ours, reference, rel_tol=1e-5, abs_tol=1e-6) or ours != ours and reference != reference
