"""A TPU is what torch_xla takes for one."""

import pytest
import torch
import torch_xla.runtime as xr
from torch_xla._internal import tpu

from trl_tpu.parallel.mesh import peak_flops_of
from trl_tpu.runtime import current
from trl_tpu.runtime.device_choice import PCI_DEVICES, PCI_VENDOR


def test_a_tpu_is_what_torch_xla_takes_for_one() -> None:
    assert tpu._GOOGLE_PCI_VENDOR_ID == PCI_VENDOR and set(tpu._TPU_PCI_DEVICE_IDS) == PCI_DEVICES


@pytest.mark.parametrize(("slice_name", "peak"), [("v5litepod-8", 197e12), ("v5p-16", 459e12), ("v6e-4", 918e12)])
def test_the_peak_is_that_of_the_chips_of_this_slice(
    slice_name: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch_xla reads it where a pod's environment names the slice."""
    assert current().chip() is None
    monkeypatch.setattr(xr, "device_type", lambda: "TPU")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", slice_name)
    assert peak_flops_of(current().chip()) == peak
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    assert current().chip() is None
    assert current().most_memory(torch.device("xla")) is None  # torch_xla does not say it of devices joined to one
