"""A folder belongs to one run: no other process trains there, and files of another run are moved away."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import subprocesses
from checkpoints import write_checkpoint

from trl_tpu.checkpoint.folders import MANIFEST_FILE, RUN_FILE, STAGING_FOLDER, RemoteRun, RunFolder
from trl_tpu.config.reward_config import private_folder
from trl_tpu.errors import UserError

CLAIMS = """
import sys
from pathlib import Path
from trl_tpu.checkpoint.folders import RunFolder
RunFolder(Path(sys.argv[1]), None, writes=True).claim()
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


@contextmanager
def training(folder: Path, resumed: Path | None = None, step: int = 0) -> Iterator[RunFolder]:
    """Claim and begin a run folder as a training process does, optionally resuming from a checkpoint."""
    found = RunFolder(folder, None, writes=True)
    found.claim()
    try:
        found.begin(None if resumed is None else str(resumed), step)
        yield found
    finally:
        found.release()


def test_second_process_is_rejected_until_the_first_has_ended(tmp_path: Path) -> None:
    """Reading files does not release the lock."""
    for _ in range(2):
        with training(tmp_path):
            assert json.loads((tmp_path / RUN_FILE).read_text())["process"] == os.getpid()
            with pytest.raises(UserError, match="output_dir"):  # a second trainer of this process, under another path
                RunFolder(tmp_path / ".." / tmp_path.name, None, writes=True).claim()
            RunFolder(tmp_path, None, writes=False).claim()  # a reader needs no claim
            other = subprocesses.run("-c", CLAIMS, str(tmp_path), status=1)
            assert f"UserError: Process {os.getpid()} on " in other.stderr
    subprocesses.run("-c", CLAIMS, str(tmp_path))


def test_base_model_inside_the_run_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters would refer to a moved folder, or to another model, because the new run also saves step 6."""
    write_checkpoint(tmp_path / "out", 6)
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path("out"), None, writes=True)
    with pytest.raises(UserError, match="output_dir"):
        run.begin(None, 0, ["out/checkpoint-6"])
    assert names(tmp_path / "out") == {"checkpoint-6"}
    run.begin(None, 0, ["org/model", "out"])
    assert names(tmp_path / "out") == set()


def test_resumed_run_keeps_only_its_own_earlier_checkpoints(tmp_path: Path) -> None:
    here = tmp_path / "here"
    checkpoints = {step: write_checkpoint(here, step) for step in (10, 40, 60)}
    with training(here, checkpoints[40], 40):
        assert names(here) == {"checkpoint-10", "checkpoint-40"}
    with training(here, write_checkpoint(tmp_path / "elsewhere", 30), 30):
        assert names(here) == set()
    found = RunFolder(here, None, writes=False)
    found.claim()
    assert not found.began_without_a_checkpoint, "the run began from a checkpoint"


def test_run_file_lists_every_resumed_step(tmp_path: Path) -> None:
    def resumed_at(step: int | None = None) -> list[int]:
        with training(tmp_path, None if step is None else write_checkpoint(tmp_path, step), step or 0):
            return json.loads((tmp_path / RUN_FILE).read_text())["resumed_at"]

    assert resumed_at() == []
    assert resumed_at(10) == [10]
    assert resumed_at(40) == resumed_at(40) == [10, 40]
    assert resumed_at(20) == [10, 20], "steps after 20 do not belong to this run"
    assert resumed_at() == []


@pytest.mark.parametrize(
    ("limit", "needed", "left"),
    [(None, 8, {2, 4, 6, 8}), (0, 8, {2, 4, 6, 8}), (2, 8, {6, 8}), (1, 4, {4}), (3, 2, {2, 6, 8})],
)
def test_earliest_checkpoints_go_unless_needed(limit: int | None, needed: int, left: set[int], tmp_path: Path) -> None:
    """Steps decide, not dates. Folders whose names only begin like a checkpoint's are kept."""
    for age, step in enumerate((8, 6, 4, 2)):
        os.utime(write_checkpoint(tmp_path, step), (1000 + age,) * 2)
    (tmp_path / "checkpoint-1-my-backup").mkdir()
    RunFolder(tmp_path, None, writes=True).rotate(limit, {f"checkpoint-{needed}"})
    assert names(tmp_path) == {f"checkpoint-{step}" for step in left} | {"checkpoint-1-my-backup"}
    assert not (tmp_path / STAGING_FOLDER).exists()


def test_staging_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    staging = tmp_path / STAGING_FOLDER
    (staging / "checkpoint-6").mkdir(parents=True)
    (staging / "my notes").write_text("of the user")
    RunFolder(tmp_path, None, writes=True).claim()
    assert [path.name for path in staging.iterdir()] == ["my notes"]


def test_run_at_a_url_owns_its_remote_folder(tmp_path: Path) -> None:
    files, url = fsspec.filesystem("memory"), "memory://runs/shared"
    for name in (MANIFEST_FILE, "progress.json", "state/host-0.safetensors"):
        files.pipe_file(f"/runs/shared/checkpoint-60/{name}", b"{}")
    run = RunFolder(tmp_path, RemoteRun(url), writes=True)
    run.claim()
    run.begin(None)
    assert run.checkpoints() == []
    (moved,) = files.glob("/runs/shared/_earlier/*/checkpoint-60")
    assert len(files.find(moved)) == 3
    again = RunFolder(tmp_path, RemoteRun(url), writes=False)
    again.claim()
    assert again.began_without_a_checkpoint


def test_unwritable_url_is_rejected_before_training(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    run = RunFolder(tmp_path, RemoteRun(f"file://{tmp_path}/a file/run"), writes=True)
    with pytest.raises(UserError, match="a file/run"):
        run.claim()


def test_downloads_use_a_private_folder() -> None:
    one, other = (Path(private_folder("memory://runs/shared")) for _ in range(2))
    assert one != other and one.name == other.name == "shared"
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700 and not one.is_symlink()
