"""Processes of plain torch led by accelerate save, stop and resume together."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import two_processes
from training import logged


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


def test_two_processes_end_equally_after_a_time_limit(process_results: list[dict[str, Any]]) -> None:
    for found in process_results[1:]:
        assert found["a time limit"] == "stopped by training_time_limit"
        assert found["a time limit and a SIGTERM"] == "SIGTERM"


def equal(ours: Any, reference: Any) -> bool:
    """Compare results from JSON: rewards and losses to 1e-6, norms to 1e-5."""
    if isinstance(reference, dict):
        return ours.keys() == reference.keys() and all(equal(ours[key], reference[key]) for key in reference)
    if isinstance(reference, list):
        return len(ours) == len(reference) and all(map(equal, ours, reference))
    return math.isclose(ours, reference, rel_tol=1e-5, abs_tol=1e-6) or ours != ours and reference != reference


def check_resumed_to_the_bit(folder: Path) -> None:
    found = [json.loads((folder / f"{process}.json").read_text()) for process in range(2)]
    for each in found:
        assert each["equal"]
        assert each["resumed"] == each["whole"]
    assert [log["step"] for log in found[0]["whole"]] == [4, 6]


def test_preemption_of_one_process_stops_both_and_resumes_bitwise(folder: Path) -> None:
    check_resumed_to_the_bit(folder)


@pytest.mark.long
def test_torchrun_starts_two_processes(model_folder: str, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    subprocesses.run_without_server(*launcher, two_processes.__file__, model_folder, str(tmp_path), USE_TORCH_XLA="0")
    check_resumed_to_the_bit(tmp_path)


def test_single_process_resumes_the_metric_sums_of_two(folder: Path, model_folder: str, tmp_path: Path) -> None:
    """The sums are then on one device, in the same batches, and equal up to rounding."""
    trainer = two_processes.make_trainer(model_folder, tmp_path, per_device_eval_batch_size=4)
    trainer.train(resume_from_checkpoint=str(folder / "stopped" / "checkpoint-3"))
    whole = json.loads((folder / "0.json").read_text())["whole"]
    assert [log["eval_pairs"] for log in whole if "eval_pairs" in log] == [8]
    for ours, theirs in zip(logged(trainer), whole, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-4), ours["step"]
