"""The plan passes libtpu the flags of training on a TPU, and TPUs are detected as by torch_xla."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla._internal import tpu

from trl_tpu.parallel.mesh import CHIPS
from trl_tpu.runtime import current
from trl_tpu.runtime import device_choice as libtpu
from trl_tpu.runtime.device_choice import PCI_DEVICES, PCI_VENDOR

TorchXla = Callable[[int, str], list[str]]


@pytest.fixture
def torch_xla_flags(monkeypatch: pytest.MonkeyPatch) -> TorchXla:
    """Return a function that gives ``LIBTPU_INIT_ARGS`` after an import of torch_xla on a TPU generation."""

    def flags(version: int, given: str) -> list[str]:
        monkeypatch.setattr(tpu, "version", lambda: version)
        monkeypatch.setenv(libtpu.VARIABLE, given)
        torch_xla._setup_libtpu_flags()
        return os.environ[libtpu.VARIABLE].split()

    return flags


@pytest.mark.parametrize(("topology", "version"), [("v5e:2x4", 5), ("v5p:2x2x4", 5), ("v6e:4x4", 6)])
def test_plan_passes_the_compiler_flags_of_training(
    topology: str, version: int, torch_xla_flags: TorchXla, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = "--xla_latency_hiding_scheduler_rerun=3 --xla_tpu_of_my_own=true"
    torch_xla_flags(version, given)
    library = tmp_path / "libtpu.so"
    library.write_text(" ".join(libtpu.FLAGS))
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    libtpu.set_flags()  # the trainer calls it after the import of torch_xla
    assert sorted(libtpu.flags_for(topology, given).split()) == sorted(os.environ[libtpu.VARIABLE].split())


def test_users_flags_are_kept() -> None:
    name, value = next(iter(libtpu.FLAGS.items()))
    kept = libtpu.flags_for("v5e:2x4", f"--{name}=0 --mine=1").split()
    assert f"--{name}=0" in kept and f"--{name}={value}" not in kept and "--mine=1" in kept


def test_libtpu_gets_only_flags_it_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An unknown flag would end the process. Without libtpu no flag is set."""
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"\0\xffxla_known\0xla_other\0")
    assert libtpu.supported_flags({"xla_known": "1", "xla_unknown": "2"}, library) == {"xla_known": "1"}
    for name in ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH", libtpu.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    libtpu.set_flags()
    assert libtpu.VARIABLE not in os.environ
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    libtpu.set_flags()
    assert os.environ[libtpu.VARIABLE] == ""


def test_tpu_detection_equals_torch_xlas() -> None:
    assert tpu._GOOGLE_PCI_VENDOR_ID == PCI_VENDOR and set(tpu._TPU_PCI_DEVICE_IDS) == PCI_DEVICES


@pytest.mark.parametrize(("slice_name", "peak"), [("v5litepod-8", 197e12), ("v5p-16", 459e12), ("v6e-4", 918e12)])
def test_peak_speed_is_that_of_the_slices_chips(slice_name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla reads the slice from a pod's environment."""
    assert current().chip() is None
    monkeypatch.setattr(xr, "device_type", lambda: "TPU")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", slice_name)
    assert CHIPS[str(current().chip())].peak_flops == peak
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    assert current().chip() is None
    assert current().peak_memory(torch.device("xla")) is None  # torch_xla does not report it for SPMD devices
