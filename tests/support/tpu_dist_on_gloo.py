"""Stands in for TorchTPU's backend `tpu_dist`, which XLA's CPU plugin lacks: collectives go over gloo, on the host.

To be imported when torch_tpu is, and before processes meet.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future


class OnGloo(dist.ProcessGroup):
    """Copies tensors of any device to the host, lets gloo do the work there, and copies the results back."""

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
        for output, given in zip(outputs, inputs, strict=True):
            host = given.detach().cpu()
            found = [torch.empty_like(host) for _ in output]
            self._gloo.allgather([found], [host]).wait()
            for each, tensor in zip(output, found, strict=True):
                each.detach().copy_(tensor)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.allgather([output.view(self.size(), *given.shape).unbind()], [given])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given)
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


dist.Backend.register_backend("tpu_dist", OnGloo, devices=["tpu"])
