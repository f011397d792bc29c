"""Two hosts act at the same steps, and one of them writes and logs. State stays float32 in TPU branches."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import subprocesses
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from environment import QUICK_XLA_FLAGS, SUPPORT

from trl_tpu import runtime
from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.parallel.mesh import MeshShape


def run_hosts(folder: Path, kind: str, status: int = 0) -> list[subprocess.CompletedProcess]:
    """Run two hosts until both end with this status."""
    hosts = [("one_of_two_hosts.py", index, str(folder), kind) for index in ("0", "1")]
    return subprocesses.run_ranks(*hosts, status=status, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")


def printed(processes: list[subprocess.CompletedProcess]) -> list[dict[str, Any]]:
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def hosts(folder: Path) -> list[dict[str, Any]]:
    """Return each host's results and other output."""
    ended = run_hosts(folder, "stop in a step")
    return [found | {"told": each.stdout} for found, each in zip(printed(ended), ended, strict=True)]


def test_request_of_one_host_applies_to_both(hosts: list[dict[str, Any]], folder: Path) -> None:
    # only host 1 requested to stop, within step 5: both stop at their next vote, at the latest at the log
    assert hosts[0]["steps"] == hosts[1]["steps"] in (5, 6)
    saved = {path.name for path in (folder / "out").iterdir()}
    assert {"checkpoint-2", "checkpoint-4"} <= saved  # only host 1 requested the save at step 2
    assert [host["saved"] for host in hosts] == [[2, 2], [2, 2]]  # no host continues before all files are written


def test_only_the_first_host_logs_writes_and_decides_metrics(hosts: list[dict[str, Any]]) -> None:
    assert [(bool(host["logged"]), host["should_save"]) for host in hosts] == [(True, True), (False, False)]
    assert ["loss" in host["told"] for host in hosts] == [True, False]
    assert [host["whose metrics"] for host in hosts] == [0, 0]


def test_sigterm_to_one_host_stops_both(tmp_path: Path) -> None:
    """The signal arrives during an evaluation. Both hosts abort it, save, and exit with the unfinished status."""
    run_hosts(tmp_path, "SIGTERM", status=75)
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Preemption"]["attributes"] == {"stopped_by": "SIGTERM"}
    assert not any("eval_loss" in log for log in state["log_history"])


@pytest.mark.parametrize(("kind", "name"), [("other data", "training data"), ("other stream", "layout of batches")])
def test_hosts_with_different_data_are_rejected(kind: str, name: str, tmp_path: Path) -> None:
    """Otherwise they would wait for each other forever."""
    for process in run_hosts(tmp_path, kind, status=1):
        assert name in process.stderr


def test_save_from_two_hosts_is_complete(hosts: list[dict[str, Any]], folder: Path) -> None:
    assert (folder / "final" / "model.safetensors").is_file()
    checkpoint = {path.name for path in (folder / "out" / "checkpoint-4").iterdir()}
    assert {"state", "progress.json", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= checkpoint
    assert "model.safetensors" not in checkpoint  # no host has the full weights: `state` has their shards
    assert hosts[0]["rewards"] == pytest.approx(hosts[1]["rewards"], abs=1e-6)


def test_both_hosts_resume_the_same_checkpoint_and_stop_together(hosts: list[dict[str, Any]], folder: Path) -> None:
    resumed = printed(run_hosts(folder, "resume"))
    assert [host["steps"] for host in resumed] == [6, 6]
    assert [host["logged"] for host in resumed] == [[6, 6, 6], []]  # step 6, training, evaluation
    assert resumed[0]["rewards"] == pytest.approx(resumed[1]["rewards"], abs=1e-6)


def test_shards_of_several_hosts_are_gathered_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    current: Any = runtime.current()
    current.set_mesh(MeshShape(fsdp=8).sizes, 1)
    weight = torch.arange(64.0).view(16, 4)
    placed = current.place(weight, ("fsdp", None), torch_xla.device())
    monkeypatch.setattr(xr, "process_count", lambda: 2)
    assert torch.equal(to_host({"weight": placed}, current)["weight"], weight)


@pytest.mark.parametrize("mesh", [MeshShape(data=2, fsdp=4), MeshShape(fsdp=4, tensor=2)], ids=str)
@pytest.mark.parametrize("order", ["as numbered", "another"])
def test_devices_hold_the_rows_of_their_host(mesh: MeshShape, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are torch_xla's, for any order of devices in the mesh. Other rows are arbitrary."""
    current: Any = runtime.current()
    current.set_mesh(mesh.sizes, 1)
    if order == "another":
        devices = np.random.default_rng(0).permutation(8)
        monkeypatch.setattr(current, "_mesh", xs.Mesh(devices, tuple(mesh.sizes.values()), tuple(mesh.sizes)))
    all_devices = torch_xla._XLAC._xla_get_runtime_devices()
    rows = torch.arange(48).view(16, 3)
    uploaded = current.upload(rows, ("data", "fsdp"), torch_xla.device())
    torch_xla.sync(wait=True)
    shards = {shard.shard_device: shard.data for shard in xs.wrap_if_sharded(uploaded).local_shards}
    assert set(shards) == set(all_devices)
    # order of two hosts in a 4 x 4 slice
    for own in (all_devices[:2] + all_devices[4:6], all_devices[2:4] + all_devices[6:]):
        monkeypatch.setattr(torch_xla._XLAC, "_xla_get_runtime_devices", lambda own=own: own)
        held = sorted({int(row[0]) // 3 for device in own for row in shards[device]})
        garbled = torch.full_like(rows, -1)
        garbled[held] = rows[held]
        again = current.upload(garbled, ("data", "fsdp"), torch_xla.device())
        torch_xla.sync(wait=True)
        mine = {s.shard_device: s.data for s in xs.wrap_if_sharded(again).local_shards if s.shard_device in own}
        assert all(torch.equal(mine[device], shards[device]) for device in own)


# ---- in the TPU branches of accelerate and transformers, float32 state does not become bfloat16


def test_state_stays_float32_in_tpu_branches(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FLAGS": QUICK_XLA_FLAGS}
    words = (str(SUPPORT / "tpu_branches.py"), str(tmp_path))
    printed = subprocesses.run_without_server(*words, environment=plain, **devices)
    found = json.loads(printed.splitlines()[-1])
    assert "accelerate.state" in found["asked for a TPU"]
    assert found["computes in bfloat16"]
    assert found["in packed rows"]
    for name in ("weights", "buffers", "optimizer", "saved weights", "saved optimizer"):
        assert found[name] == ["torch.float32"], name
    assert found["inside"]["loss"] == "torch.float32"
    assert (found["inside"]["q_proj"], found["inside"]["score"]) == ("torch.bfloat16", "torch.float32")
    assert found["rewards"] == "float32"
    assert found["fine losses"] and found["fine rewards"]
    # embedding, norm, rotary frequencies, Adam's step and moments
    assert found["device keeps float32"] == [True] * 6
