"""Plain torch in several processes, which accelerate leads: they save, stop and resume as one."""

import json
import math
from pathlib import Path
from typing import Any

import apart
import pytest
import two_processes
from training import logged


@pytest.fixture(scope="module")
def folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process alone has written to, and two."""
    folder = tmp_path_factory.mktemp("runs")
    words = ("two_processes.py", model_folder, str(folder))
    apart.run(*words, USE_TORCH_XLA="0")
    apart.at_once(*((*words, rank) for rank in "01"), USE_TORCH_XLA="0")
    return folder


@pytest.fixture(scope="module")
def agreed(folder: Path) -> list[dict[str, Any]]:
    """What one process gave alone, and each of two."""
    return [json.loads((folder / f"{name}.json").read_text()) for name in ("alone", "0", "1")]


@pytest.mark.parametrize("way", two_processes.WAYS)
def test_two_processes_give_what_one_gives(agreed: list[dict[str, Any]], way: str) -> None:
    one, *two = (found[way] for found in agreed)
    assert one["packed"] == ("padded" not in way)
    assert [log["step"] for log in one["logged"] if "eval_loss" in log] == [3, 6]
    for found in two:
        assert equal(found, one) and equal(found["resumed"], one["logged"])


def test_a_last_batch_of_training_is_filled_up_as_by_trl(agreed: list[dict[str, Any]]) -> None:
    for found in agreed[1:]:
        assert found["trl_tpu"] == pytest.approx(found["trl"], abs=1e-6)


def test_two_processes_end_alike_after_a_time_limit(agreed: list[dict[str, Any]]) -> None:
    for found in agreed[1:]:
        assert found["a time limit"] == "stopped by training_time_limit"
        assert found["a time limit and a SIGTERM"] == "SIGTERM"


def equal(ours: Any, reference: Any) -> bool:
    """Compare what was read from JSON; rewards and losses to 1e-6, norms to 1e-5."""
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


def test_a_stop_that_one_of_two_processes_is_told_of_is_resumed_to_the_bit(folder: Path) -> None:
    check_resumed_to_the_bit(folder)


@pytest.mark.long
def test_torchrun_starts_the_two_processes(model_folder: str, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    apart.cold(*launcher, two_processes.__file__, model_folder, str(tmp_path), USE_TORCH_XLA="0")
    check_resumed_to_the_bit(tmp_path)


def test_a_single_process_goes_on_with_what_both_had_added_up(folder: Path, model_folder: str, tmp_path: Path) -> None:
    """The total is then on one device, in the same batches, and all sums are to rounding."""
    trainer = two_processes.make_trainer(model_folder, tmp_path, per_device_eval_batch_size=4)
    trainer.train(resume_from_checkpoint=str(folder / "stopped" / "checkpoint-3"))
    whole = json.loads((folder / "0.json").read_text())["whole"]
    assert [log["eval_pairs"] for log in whole if "eval_pairs" in log] == [8]
    for ours, theirs in zip(logged(trainer), whole, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-4), ours["step"]


def test_an_evaluation_counts_every_pair_once(agreed: list[dict[str, Any]]) -> None:
    alone, *two = (found["evaluated"] for found in agreed)
    for found in two:
        assert found == pytest.approx(alone, abs=1e-6)
