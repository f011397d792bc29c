"""A save is complete or invisible, and a failed save leaves nothing: without a Trainer, in plain torch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import tiny
import torch
from fake_hosts import AllGather, Host, SingleHost
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from torch import nn

from trl_tpu.checkpoint import folders
from trl_tpu.checkpoint.checkpointer import CheckpointContents, Checkpointer
from trl_tpu.checkpoint.folders import MANIFEST_FILE, RemoteRun, RunFolder, find_faults
from trl_tpu.checkpoint.state_dict import older_weights
from trl_tpu.errors import UserError
from trl_tpu.modeling.head_spec import RewardScale, set_reward_normalization
from trl_tpu.runtime.native import Runtime


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
    with pytest.raises(UserError, match="outside"):
        RemoteRun("memory://run/checkpoint-1").get(tmp_path / "copy" / "of")
    assert list(tmp_path.iterdir()) == []
