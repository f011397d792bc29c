"""Checkpoints of a model sharded over processes: bitwise resumes, resumes on other meshes and after kills."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_runs
import pytest
import subprocesses
import torch
from safetensors.torch import load_file

from trl_tpu.checkpoint.folders import find_faults
from trl_tpu.scripts import export

XLA = 0  # stands for a number of processes: one process that leads eight XLA devices
ON_XLA = {"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}


Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def train(model_folder: str) -> Train:
    """Return a function that trains in several processes, checks their exit status and returns their results."""

    def train(out: Path, count: int, status: int = 0, **settings: Any) -> dict[str, Any]:
        command = ("saved_ranks.py", model_folder, json.dumps({"output_dir": str(out)} | settings))
        if count == XLA:
            if importlib.util.find_spec("torch_xla") is None:
                pytest.skip("torch_xla is not installed")
            subprocesses.run(*command, **ON_XLA)
        else:
            places = [(str(count), str(rank)) for rank in range(count)] if count > 1 else [()]
            subprocesses.run_ranks(*((*command, *place) for place in places), status=status, USE_TORCH_XLA="0")
        first, *others = [json.loads((out / f"{rank}.json").read_text()) for rank in range(max(count, 1))]
        assert all(other == first for other in others)
        return first

    return train


@pytest.fixture(scope="module")
def whole_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of two processes that saved every second of six steps, and their logs."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, 2, mesh="fsdp=2")["logged"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def assert_same(folder: Path, other: Path) -> None:
    """Check that two folders hold bitwise equal weights."""
    ours, theirs = tensors(folder), tensors(other)
    assert ours.keys() == theirs.keys() != set()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), (folder, other)


EVALUATES = {"mesh": None, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 3}


@pytest.mark.parametrize("settings", [{"mesh": "fsdp=2"}, EVALUATES], ids=["fsdp=2", "DDP"])
def test_preemption_of_one_rank_stops_all_and_resumes_bitwise(settings: Any, train: Train, tmp_path: Path) -> None:
    """Also between two logs. An evaluation that is due at the stop is skipped."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    logged = train(whole, 2, **settings)["logged"]
    assert train(out, 2, status=75, save_steps=100, told=2, **settings)["stopped by"] == "SIGTERM"
    (checkpoint,) = out.glob("checkpoint-*")
    assert train(out, 2, resume=str(checkpoint), **settings)["logged"] == logged
    assert_same(out, whole)


@pytest.mark.parametrize(
    ("count", "mesh"), [(1, None), (4, "data=2,fsdp=2"), (4, "fsdp=2,tensor=2"), (XLA, "fsdp=4,tensor=2")]
)
def test_checkpoint_resumes_on_another_mesh_and_back(
    count: int, mesh: str | None, train: Train, whole_run: Any, tmp_path: Path
) -> None:
    """Equal up to rounding: losses of 0.7 to a few float32 units of 6e-8, norms of all weights to a relative 1e-5."""
    folder, logged = whole_run
    there, back = tmp_path / "there", tmp_path / "back"
    train(there, count, mesh=mesh, max_steps=4, resume=str(folder / "checkpoint-2"))
    found = train(back, 2, mesh="fsdp=2", resume=str(there / "checkpoint-4"))["logged"]
    assert found.keys() == logged.keys()
    for step, (loss, norm) in logged.items():
        assert found[step] == [pytest.approx(loss, abs=1e-6, rel=0), pytest.approx(norm, rel=1e-5)], step


def test_rows_sharded_over_two_axes_resume_bitwise(train: Train, tmp_path: Path) -> None:
    """Readers and copies of shards must keep the order of rows. Shapes do not reveal it."""
    settings: dict[str, Any] = {"mesh": "fsdp=2,tensor=2", "max_steps": 4}
    first, second = tmp_path / "first", tmp_path / "second"
    logged = train(first, 4, **settings)
    assert train(second, 4, resume=str(first / "checkpoint-2"), **settings) == logged
    assert_same(first, second)
    export.run([str(first / "checkpoint-4"), str(tmp_path / "out")])
    assert_same(first, tmp_path / "out")


BEST = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": True}
BEST |= {"mesh": "fsdp=2", "load_best_model_at_end": True}


def test_best_model_of_model_only_saves_is_loaded_at_the_end(train: Train, tmp_path: Path) -> None:
    """The first model is the best: the metric is the greatest loss."""
    train(tmp_path, 2, save_only_model=True, max_steps=4, **BEST)
    assert_same(tmp_path, tmp_path / "checkpoint-2")
    best, last = (tensors(tmp_path / name) for name in ("checkpoint-2", "checkpoint-4"))
    assert not all(torch.equal(last[name], best[name]) for name in best)


def test_adapters_resume_bitwise_and_the_best_are_loaded(train: Train, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    logged = train(first, 2, adapters=True, **BEST)
    assert train(second, 2, adapters=True, resume=str(first / "checkpoint-4"), **BEST) == logged
    export.run([str(first / "checkpoint-2"), str(tmp_path / "best")])
    for folder in (first, second):
        assert_same(folder, tmp_path / "best")
        config = json.loads((folder / "base_model_config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"]  # without FSDP2's prefix


@pytest.mark.parametrize(
    ("mesh", "size"),
    [("fsdp=2", 10_000), ("fsdp=2", 20_000), (None, 20_000)],
    ids=["random states", "shards", "shards without a mesh"],
)
def test_full_disk_of_one_rank_fails_the_save_of_both(
    mesh: str | None, size: int, train: Train, whole_run: Any, tmp_path: Path
) -> None:
    """Training either waits for the save or continues during it. Later saves are complete."""
    rank = 0 if mesh is None else 1  # rank 0 writes the tensors of a replicated model
    found = train(tmp_path, 2, mesh=mesh, small=[rank, size])
    assert found["failed"] == ["checkpoint-2"] and found["logged"].keys() == whole_run[1].keys()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert find_faults(tmp_path / "checkpoint-4") == [] and not (tmp_path / "_unfinished").exists()


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.long)])
def test_runs_with_a_repeatedly_killed_rank_resume_bitwise(kills: int, tmp_path: Path) -> None:
    """Weights, moments and logs are bitwise those of the uninterrupted run."""
    settings = {"processes": 2, "mesh": "fsdp=2", "use_cpu": True}
    report = killed_runs.report(tmp_path, kills, {"USE_TORCH_XLA": "0"}, **settings)
    assert report["kills"] >= kills and report["saves_hit"] >= 1 and report["resumes"] >= kills // 2, report
