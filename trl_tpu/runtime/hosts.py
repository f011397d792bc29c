"""Several hosts, one process each: what has to go from host to host beside the devices' own network.

torch_xla's ``rendezvous`` is no barrier under SPMD, where every host counts as the only one
(https://github.com/pytorch/xla/issues/9479). So the hosts meet in a group of torch.distributed over gloo, at the
address of process 0, which the TPU's environment says, or MASTER_ADDR and MASTER_PORT.
"""

import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401  # knows the address "xla://"
import torch_xla.runtime as xr

from .base import PATIENCE, Value


def all_gather_object(value: Value, while_saving: bool = False) -> list[Value]:
    """Return what each host gives, in their order."""
    if xr.process_count() == 1:
        return [value]
    _join()
    gathered = [value] * xr.process_count()
    dist.all_gather_object(gathered, value, group=saving_group() if while_saving else None)
    return gathered


def saving_group() -> dist.ProcessGroup | None:
    """Return the group of all hosts' threads that write checkpoints, while training goes on in the other group."""
    if xr.process_count() == 1:
        return None
    _join()
    return _saving[0]


_saving: list[dist.ProcessGroup] = []


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="xla://", timeout=PATIENCE)
    if not _saving:
        _saving.append(dist.new_group(backend="gloo", timeout=PATIENCE))
