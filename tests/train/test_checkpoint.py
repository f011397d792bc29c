"""Checkpoints are complete or invisible, damaged ones are named and skipped, and no file in them runs code."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_runs
import pytest
from checkpoints import write_checkpoint
from fake_hosts import SingleHost

from trl_tpu.checkpoint.checkpointer import CheckpointLoader
from trl_tpu.checkpoint.folders import MANIFEST_FILE, RunFolder, find_faults
from trl_tpu.checkpoint.state_dict import PROGRESS_FILE
from trl_tpu.errors import UserError
from trl_tpu.runtime.native import Runtime


def found(output_dir: Path, asked: str | bool = True) -> str | None:
    loader = CheckpointLoader(Runtime(), SingleHost(), shares_disk=True)
    return loader.find(asked, RunFolder(output_dir, None, writes=True), "packed", {"seed": 7})


def newer_format(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"format": 99}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "weights", 50), "weights"),
    "altered": (lambda folder: (folder / "weights").write_bytes(bytes(100)), "weights"),
    "removed": (lambda folder: (folder / "inner" / "state.json").unlink(), "inner/state.json"),
    "torn manifest": (lambda folder: os.truncate(folder / MANIFEST_FILE, 20), "manifest.json"),
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), "manifest.json"),
    "newer format": (newer_format, "format 99"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_named_and_skipped(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 9, 10):
        write_checkpoint(tmp_path, step)
    damage, fault = DAMAGES[name]
    damage(tmp_path / "checkpoint-10")
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path) == str(tmp_path / "checkpoint-9")  # numeric order: 9 comes before 10
    assert "checkpoint-10" in caplog.text and fault in caplog.text
    assert find_faults(tmp_path / "checkpoint-2") == []


@pytest.mark.parametrize(
    "name",
    ["/dev/zero", "../outside", "inner/../../outside", "link", "inner", "pipe", "loop", "a\0b", "linked/outside"],
)
def test_only_regular_files_of_the_folder_are_read(name: str, tmp_path: Path) -> None:
    """A manifest may name endless devices or files outside the checkpoint."""
    folder = write_checkpoint(tmp_path, 1)
    (tmp_path / "outside").write_bytes(b"")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"] = {name: {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    (fault,) = find_faults(folder)
    assert repr(name) in fault and "\n" not in fault
    (folder / MANIFEST_FILE).unlink()
    os.mkfifo(folder / MANIFEST_FILE)
    (fault,) = find_faults(folder)
    assert "manifest.json" in fault


def test_links_within_a_checkpoint_are_followed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1)
    (folder / "weights").rename(folder / "moved")
    (folder / "weights").symlink_to("moved")
    (tmp_path / "latest").symlink_to(folder)
    assert find_faults(tmp_path / "latest") == []


def test_error_without_a_good_checkpoint_names_the_damaged_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint-N"):
        found(tmp_path)
    os.truncate(write_checkpoint(tmp_path, 4) / "weights", 50)
    for asked in (True, str(tmp_path / "checkpoint-4")):
        with pytest.raises(UserError, match="checkpoint-4.*weights"):
            found(tmp_path, asked)


def test_auto_resumes_the_newest_checkpoint_starts_or_raises(tmp_path: Path) -> None:
    assert found(tmp_path, "auto") is None
    write_checkpoint(tmp_path / "_unfinished", 9)  # left by a killed save
    assert found(tmp_path, "auto") is None
    shutil.rmtree(tmp_path / "_unfinished")
    for step, seed in ((2, 7), (4, 7), (6, 8)):
        progress = json.dumps({"batches": "packed", "order": {"seed": seed}})
        (write_checkpoint(tmp_path, step) / PROGRESS_FILE).write_text(progress)
        if seed == 7:
            assert found(tmp_path, "auto") == str(tmp_path / f"checkpoint-{step}")
    with pytest.raises(UserError, match="checkpoint-6.*seed was 8 and is 7"):
        found(tmp_path, "auto")
    os.truncate(tmp_path / "checkpoint-6" / "weights", 50)
    write_checkpoint(tmp_path, 8)  # without a record of its run
    for newest in ("checkpoint-8", "checkpoint-6"):
        with pytest.raises(UserError, match=newest):
            found(tmp_path, "auto")
        shutil.rmtree(tmp_path / newest)
    run = RunFolder(tmp_path, None, writes=True)
    run.begin(str(tmp_path / "checkpoint-2"), step=2)
    shutil.rmtree(tmp_path / "checkpoint-2")
    run.claim()
    with pytest.raises(UserError, match="output_dir"):  # the checkpoint it was resumed from is missing
        CheckpointLoader(Runtime(), SingleHost(), shares_disk=True).find("auto", run, "packed", {})
    run.release()


@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.long)])
def test_killed_runs_resume_bitwise(kills: int, tmp_path: Path) -> None:
    """Weights, moments and logs are equal after kills at random times and during saves."""
    report = killed_runs.report(tmp_path, kills, {"USE_TORCH_XLA": "0"})
    assert report["kills"] >= kills and report["saves_hit"] >= kills // 5 and report["resumes"] >= kills // 2, report
