"""Two hosts do the same things at the same time, and one of them writes and logs."""

import json
import subprocess
from pathlib import Path
from typing import Any

import apart
import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from trl_tpu import runtime
from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.parallel.mesh import MeshShape


def start(folder: Path, kind: str, status: int = 0) -> list[subprocess.CompletedProcess]:
    """Run two hosts until both have ended with this status."""
    hosts = [("one_of_two_hosts.py", index, str(folder), kind) for index in ("0", "1")]
    return apart.at_once(*hosts, status=status, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")


def printed(processes: list[subprocess.CompletedProcess]) -> list[dict[str, Any]]:
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def hosts(folder: Path) -> list[dict[str, Any]]:
    """What each host did, and what else it printed."""
    ended = start(folder, "stop in a step")
    return [found | {"told": each.stdout} for found, each in zip(printed(ended), ended, strict=True)]


def test_what_one_host_requests_both_do(hosts: list[dict[str, Any]], folder: Path) -> None:
    # host 1 alone wanted to stop, within step 5: both do when they next meet, at the log at the latest
    assert hosts[0]["steps"] == hosts[1]["steps"] in (5, 6)
    saved = {path.name for path in (folder / "out").iterdir()}
    assert {"checkpoint-2", "checkpoint-4"} <= saved  # and it alone wanted to save at 2
    assert [host["saved"] for host in hosts] == [[2, 2], [2, 2]]  # neither goes on before all is written


def test_the_first_host_alone_logs_and_writes_and_its_metrics_decide(hosts: list[dict[str, Any]]) -> None:
    assert [(bool(host["logged"]), host["should_save"]) for host in hosts] == [(True, True), (False, False)]
    assert ["loss" in host["told"] for host in hosts] == [True, False]
    assert [host["whose metrics"] for host in hosts] == [0, 0]


def test_a_sigterm_to_one_host_is_obeyed_by_both(tmp_path: Path) -> None:
    """It comes while both evaluate, which neither ends; both save, and ask to be started again."""
    start(tmp_path, "SIGTERM", status=75)
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Preemption"]["attributes"] == {"stopped_by": "SIGTERM"}
    assert not any("eval_loss" in log for log in state["log_history"])


@pytest.mark.parametrize(("kind", "name"), [("other data", "training data"), ("other stream", "layout of batches")])
def test_hosts_with_different_data_both_refuse_to_start(kind: str, name: str, tmp_path: Path) -> None:
    """Instead of waiting for one another."""
    for process in start(tmp_path, kind, status=1):
        assert name in process.stderr


def test_what_is_saved_from_several_hosts_is_whole(hosts: list[dict[str, Any]], folder: Path) -> None:
    assert (folder / "final" / "model.safetensors").is_file()
    checkpoint = {path.name for path in (folder / "out" / "checkpoint-4").iterdir()}
    assert {"state", "progress.json", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= checkpoint
    assert "model.safetensors" not in checkpoint  # no host has it whole: `state` has its parts
    assert hosts[0]["rewards"] == pytest.approx(hosts[1]["rewards"], abs=1e-6)


def test_both_hosts_resume_from_the_same_checkpoint_and_stop_together_after_a_log(
    hosts: list[dict[str, Any]], folder: Path
) -> None:
    resumed = printed(start(folder, "resume"))
    assert [host["steps"] for host in resumed] == [6, 6]
    assert [host["logged"] for host in resumed] == [[6, 6, 6], []]  # from step 4 on; then training, then evaluation
    assert resumed[0]["rewards"] == pytest.approx(resumed[1]["rewards"], abs=1e-6)


def test_shards_of_several_hosts_come_to_the_host_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    current: Any = runtime.current()
    current.set_mesh(MeshShape(fsdp=8).sizes, 1)
    weight = torch.arange(64.0).view(16, 4)
    placed = current.place(weight, ("fsdp", None), torch_xla.device())
    monkeypatch.setattr(xr, "process_count", lambda: 2)
    assert torch.equal(to_host({"weight": placed}, current)["weight"], weight)


@pytest.mark.parametrize("mesh", [MeshShape(data=2, fsdp=4), MeshShape(fsdp=4, tensor=2)], ids=str)
@pytest.mark.parametrize("order", ["as numbered", "another"])
def test_devices_hold_the_rows_that_their_host_is_said_to_hold(
    mesh: MeshShape, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch_xla's own cutting, whatever the order of devices in the mesh; other rows may hold anything."""
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
    hosts = [all_devices[:2] + all_devices[4:6], all_devices[2:4] + all_devices[6:]]  # as on 2 of 4 x 4 chips
    for own in hosts:
        monkeypatch.setattr(torch_xla._XLAC, "_xla_get_runtime_devices", lambda own=own: own)
        held = sorted({int(row[0]) // 3 for device in own for row in shards[device]})
        garbled = torch.full_like(rows, -1)
        garbled[held] = rows[held]
        again = current.upload(garbled, ("data", "fsdp"), torch_xla.device())
        torch_xla.sync(wait=True)
        mine = {s.shard_device: s.data for s in xs.wrap_if_sharded(again).local_shards if s.shard_device in own}
        assert all(torch.equal(mine[device], shards[device]) for device in own)
