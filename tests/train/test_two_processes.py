"""Plain torch in several processes, which accelerate leads: they save, stop and resume as one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import apart
import pytest
import tiny
import two_processes


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = tiny.made_up_pairs(64)
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), [text for row in pairs for text in row.values()])


@pytest.fixture(scope="module")
def runs(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    commands = [("two_processes.py", model_folder, str(folder), rank) for rank in ("0", "1")]
    for process in apart.at_once(*commands, USE_TORCH_XLA="0"):
        assert process.returncode == 0, process.stderr[-3000:]
    return folder


def check_resumed_to_the_bit(runs: Path) -> None:
    found = [json.loads((runs / f"{process}.json").read_text()) for process in range(2)]
    for each in found:
        assert each["equal"]
        assert each["resumed"] == each["whole"]
    assert [log["step"] for log in found[0]["whole"]] == [4, 6]


def test_a_stop_that_one_of_two_processes_is_told_of_is_resumed_to_the_bit(runs: Path) -> None:
    check_resumed_to_the_bit(runs)


@pytest.mark.long
def test_torchrun_starts_the_two_processes(model_folder: str, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, two_processes.__file__, model_folder, str(tmp_path)]
    process = subprocess.run(command, env=os.environ | {"USE_TORCH_XLA": "0"}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    check_resumed_to_the_bit(tmp_path)


def test_a_single_process_goes_on_with_what_both_had_added_up(runs: Path, model_folder: str, tmp_path: Path) -> None:
    """With twice the pairs on the device the batches are the same, and all sums are to rounding."""
    trainer = two_processes.make_trainer(model_folder, tmp_path, per_device_train_batch_size=4)
    trainer.train(resume_from_checkpoint=str(runs / "stopped" / "checkpoint-3"))
    whole = json.loads((runs / "0.json").read_text())["whole"]
    for ours, theirs in zip(two_processes.logged(trainer), whole, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-4), ours["step"]


def test_an_evaluation_counts_every_pair_once(runs: Path, model_folder: str, tmp_path: Path) -> None:
    alone = two_processes.evaluated(model_folder, tmp_path)
    for process in range(2):
        assert json.loads((runs / f"{process}.json").read_text())["evaluated"] == pytest.approx(alone, abs=1e-6)
