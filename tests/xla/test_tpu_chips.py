"""A TPU is what torch_xla takes for one."""

from torch_xla._internal import tpu

from trl_tpu.runtime.device_choice import PCI_DEVICES, PCI_VENDOR


def test_a_tpu_is_what_torch_xla_takes_for_one() -> None:
    assert tpu._GOOGLE_PCI_VENDOR_ID == PCI_VENDOR and set(tpu._TPU_PCI_DEVICE_IDS) == PCI_DEVICES
