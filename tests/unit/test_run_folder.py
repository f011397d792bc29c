"""A folder belongs to one run, and a save is complete or invisible: without a Trainer, in plain torch."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import subprocesses
import tiny
import torch
from checkpoints import write_checkpoint
from fake_hosts import AllGather, Host, SingleHost
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from torch import nn

from trl_tpu.checkpoint import folders
from trl_tpu.checkpoint.checkpointer import CheckpointContents, Checkpointer
from trl_tpu.checkpoint.folders import MANIFEST_FILE, RUN_FILE, STAGING_FOLDER, RemoteRun, RunFolder, find_faults
from trl_tpu.checkpoint.state_dict import older_weights
from trl_tpu.config.reward_config import private_folder
from trl_tpu.errors import UserError
from trl_tpu.modeling.head_spec import RewardScale, set_reward_normalization
from trl_tpu.runtime.native import Runtime

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


def test_downloads_use_a_private_folder() -> None:
    one, other = (Path(private_folder("memory://runs/shared")) for _ in range(2))
    assert one != other and one.name == other.name == "shared"
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700 and not one.is_symlink()


# ---- saves


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of ``model`` with moments."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture
def model() -> Any:
    return tiny.tiny_model(tiny.tiny_tokenizer(["some text"]))


@pytest.fixture
def checkpointer() -> Checkpointer:
    return Checkpointer(Runtime(), SingleHost(), writes=True, shares_disk=True, limit=2)


MakeContents = Callable[..., CheckpointContents]


@pytest.fixture
def contents(model: Any, tmp_path: Path) -> MakeContents:
    defaults = {"model": model, "optimizer": trained(model), "best": None, "run": RunFolder(tmp_path, None, True)}
    return lambda step, **settings: CheckpointContents(
        f"checkpoint-{step}", **(defaults | {"describe": model.config.save_pretrained} | settings)
    )


def fail(*_: Any) -> None:
    raise OSError("no space left")


def test_failed_all_gather_ends_the_run_not_only_the_save(contents: MakeContents) -> None:
    """Otherwise training would continue to a step that waits for the lost process."""

    class Left(SingleHost):
        def all_gather_object(self, value: Any) -> list[Any]:
            raise RuntimeError("connection closed by peer")

    checkpointer = Checkpointer(Runtime(), Left(), writes=True, shares_disk=True, limit=2)
    with pytest.raises(RuntimeError, match="closed by peer"):
        checkpointer.save(contents(1))
    assert checkpointer.failed == []


def test_undeletable_older_checkpoint_does_not_fail_the_save(
    checkpointer: Checkpointer, contents: MakeContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "retire", fail)
    for step in (1, 2, 3):
        checkpointer.save(contents(step))
    checkpointer.wait()
    assert checkpointer.failed == [] and find_faults(tmp_path / "checkpoint-3") == []


def fail_once(store: RemoteRun, method: str, *_: Any) -> None:
    delattr(store, method)  # the next call uses the method of the class
    raise OSError("the store is away")


@pytest.mark.parametrize(("host", "what"), [(0, "delete"), (0, "put"), (1, "put")])
def test_upload_failing_on_one_host_fails_on_all(host: int, what: str, contents: MakeContents, tmp_path: Path) -> None:
    """No host waits for the host that failed."""
    url = f"memory://hosts/{what}-{host}"
    training, saving = AllGather(2), AllGather(2)

    def save_twice(index: int) -> list[str]:
        own, remote = Host(index, training, saving), RemoteRun(url)
        if index == host:
            setattr(remote, what, partial(fail_once, remote, what))
        checkpointer = Checkpointer(own, own, writes=index == 0, shares_disk=False, limit=None)
        run = RunFolder(tmp_path / str(index), remote, writes=index == 0)

        def describe(folder: Path) -> None:
            (folder / f"of-host-{index}").write_text("a file")

        for step in (1, 2):
            checkpointer.save(contents(step, describe=describe, model=None, optimizer=None, run=run))
        checkpointer.wait()
        return checkpointer.failed

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(save_twice, range(2))) == [[f"{url}/checkpoint-1"]] * 2
    assert RemoteRun(url).checkpoints() == ["checkpoint-2"]
    copy = RemoteRun(f"{url}/checkpoint-2").get(tmp_path / "copy")
    assert find_faults(copy) == [] and {"of-host-0", "of-host-1"} <= {path.name for path in copy.iterdir()}


def test_older_weights_that_would_shadow_new_ones_are_found() -> None:
    older = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["adapter_model.safetensors", "model_of_mine.safetensors", "config.json", "notes.txt"]
    newer = ["model-00001-of-00003.safetensors", "model.safetensors.index.json", "config.json"]
    assert set(older_weights(older + others, newer)) == {"model.safetensors", "model-00001-of-00002.safetensors"}


def test_config_can_be_updated_while_a_thread_saves_it(model: Any) -> None:
    saving = iter(vars(model.config).items())
    next(saving)
    set_reward_normalization(model.config, RewardScale(1.0, 2.0))
    assert "mean" not in dict(saving) and (model.config.mean, model.config.std) == (1.0, 2.0)
    set_reward_normalization(model.config, None)
    assert not hasattr(model.config, "mean")


# ---- at a URL


@pytest.mark.parametrize("run", ["run[1]", "run*", "run?", "run{1}"])
@pytest.mark.parametrize("store", ["memory://names", "file://"])
def test_brackets_in_a_url_are_not_a_pattern(store: str, run: str, tmp_path: Path) -> None:
    """fsspec reads most paths as patterns and would match run[1] with run1."""
    store = f"{store}{tmp_path}"
    (tmp_path / MANIFEST_FILE).write_text("{}")
    mine, other = RemoteRun(f"{store}/{run}"), RemoteRun(f"{store}/run1")
    for each in (mine, other):
        each.put(tmp_path, [MANIFEST_FILE], "checkpoint-1")
        each.put(tmp_path, [MANIFEST_FILE], "checkpoint-2/state")
    assert mine.checkpoints() == ["checkpoint-1"]
    assert (RemoteRun(f"{mine.url}/checkpoint-1").get(tmp_path / "copy") / MANIFEST_FILE).is_file()
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        mine.delete(name)
    assert mine.checkpoints() == [] and other.checkpoints() == ["checkpoint-1"]
    files = fsspec.filesystem(store.partition(":")[0])
    assert files.find(mine.url) == [] and len(files.find(other.url)) == 2
    assert not files.exists(f"{mine.url}/checkpoint-1")


@pytest.mark.parametrize("name", ["../escaped", "state/../../escaped", "..", "{absolute}/escaped", "\0"])
def test_names_outside_the_download_are_rejected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("/run/checkpoint-1/first", f"/run/checkpoint-1/{name.format(absolute=tmp_path)}")
    store = {path: MemoryFile(None, path, b"hostile") for path in paths}
    monkeypatch.setattr(MemoryFileSystem, "store", store)
    with pytest.raises(OSError, match="outside"):
        RemoteRun("memory://run/checkpoint-1").get(tmp_path / "copy" / "of")
    assert list(tmp_path.iterdir()) == []
