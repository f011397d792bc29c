"""Create torch's device `tpu` on XLA's CPU plugin; import this before anything else touches a device.

It needs the environment that `torchtpu_check.sh` prepares. As a script it runs another script as one rank of several:

    python tests/support/torchtpu_device.py SCRIPT WORDS...

Each rank has its own CPU plugin, which knows a single process. Collectives therefore go over gloo.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_tpu
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch_tpu._internal.utils import hardware

hardware.get_tpu_device_count = lambda: 1  # torch_tpu counts TPUs on the PCI bus, and there are none
torch_tpu._loader.load()


class OnGloo(dist.ProcessGroup):
    """Copies tensors to the host, runs the collective there with gloo, and copies the results back.

    It replaces TorchTPU's backend `tpu_dist`, which XLA's CPU plugin lacks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "tpu_dist"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done(None)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            host = tensor.detach().cpu()
            self._gloo.broadcast([host], opts).wait()
            tensor.detach().copy_(host)
        return _done(tensors)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            tensor.detach().copy_(self._reduced(tensor, opts.reduceOp))
        return _done(tensors)

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        host, options = tensor.detach().to("cpu", copy=True), dist.AllreduceOptions()
        is_mean = operation == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if is_mean else operation
        self._gloo.allreduce([host], options).wait()
        return host / self.size() if is_mean else host

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            host = tensor.detach().cpu()
            gathered = [torch.empty_like(host) for _ in output]
            self._gloo.allgather([gathered], [host]).wait()
            for part, gathered_part in zip(output, gathered, strict=True):
                part.detach().copy_(gathered_part)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.allgather([output.view(self.size(), *given.shape).unbind()], [given])

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], given: Sequence[Tensor], opts: Any = None) -> Any:
        for output, each in zip(outputs, given, strict=True):
            self.all_gather_single(output, each)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        output.detach().copy_(self._reduced(given, opts.reduceOp).view(self.size(), *output.shape)[self.rank()])
        return _done(output)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, opts)
        return _done(outputs)


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


if __name__ == "__main__":
    dist.Backend.register_backend("tpu_dist", OnGloo, devices=["tpu"])
    torch.set_num_threads(1)
    torch.zeros(1, device="tpu").cpu()  # start the plugin before the script announces several processes
    sys.argv = [str(Path(__file__).with_name(sys.argv[1])), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
