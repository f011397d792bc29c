"""Makes torch's device `tpu` of XLA's CPU plugin: imported before anything else touches a device.

It needs the environment that `torchtpu_check.sh` makes. torch_tpu counts TPUs on the PCI bus, so it is told of one.
"""

import torch_tpu
from torch_tpu._internal.utils import hardware

hardware.get_tpu_device_count = lambda: 1
torch_tpu._loader.load()
