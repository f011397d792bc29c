"""PyTorch/XLA with SPMD: one process per host, and one mesh over all devices."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend  # registers the init method "xla://"
import torch_xla.runtime as xr
from accelerate import PartialState
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan
from torch.optim import Optimizer
from torch_xla._internal import tpu
from torch_xla.backends import set_mat_mul_precision
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards, _sharded_cpu_state_dict
from torch_xla.experimental.scan import _scan_impl_flat

from ..errors import UserError
from . import device_choice
from .layer_loop import OnHost, recompute, scan_layers
from .native import COLLECTIVE_TIMEOUT, LoopStep, PartitionSpec, Remat, Runtime, Topology, einsum, set_tpu_arguments

logger = logging.getLogger(__name__)

ShardingChange = Callable[[torch.Tensor], torch.Tensor]


def _solve_triangular(
    matrix: torch.Tensor, values: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """Solve by `triangular_solve`, on the device. torch_xla 2.9 would run `linalg.solve_triangular` on the host."""
    if not left:
        return _solve_triangular(matrix.mT, values.mT, upper=not upper, unitriangular=unitriangular).mT
    return torch.triangular_solve(values, matrix, upper=upper, unitriangular=unitriangular)[0]


torch.library.impl("aten::linalg_solve_triangular", "xla", _solve_triangular)


def shard_count(mesh: xs.Mesh, over: str | tuple[str, ...] | None) -> int:
    """Return the number of shards of a dimension that is sharded over the given axes."""
    sizes = mesh.shape()
    return prod(sizes.get(axis, 1) for axis in ((over,) if isinstance(over, str) else over or ()))


class ChangeSharding(torch.autograd.Function):
    """Applies ``change`` to a tensor, and ``change_back`` to its gradient.

    torch_xla's function for this, `mark_sharding_with_gradients`, parses the mesh at every call.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, change: ShardingChange, change_back: ShardingChange) -> torch.Tensor:
        ctx.change_back = change_back
        return change(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.change_back(gradient), None, None


def _constrained_copy(tensor: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec) -> torch.Tensor:
    copy = tensor.clone()
    torch_xla._XLAC._xla_mark_sharding(copy, mesh.get_op_sharding(axes))
    return copy


class HostShards(_CpuShards):
    """This host's shards of a tensor, as host tensors with their indices in the full tensor."""

    def __getitem__(self, index: int) -> "HostShards":
        """Return the shards of ``tensor[index]``, without a copy. The first dimension must not be sharded."""
        shards = [replace(shard, data=shard.data[index], indices=shard.indices[1:]) for shard in self.shards]
        return HostShards(shards, self.global_shape[1:])

    def join(self) -> torch.Tensor:
        """Return the full tensor. This host must have all of its shards."""
        joined = torch.empty(self.global_shape, dtype=self.shards[0].data.dtype)
        for shard in self.shards:
            joined[tuple(shard.indices)] = shard.data[tuple(slice(0, at.stop - at.start) for at in shard.indices)]
        return joined


class SavePlanner(SPMDSavePlanner):
    """torch_xla's save planner, made correct for hosts with several devices that hold the same shard.

    For each occurrence of a shard after the first, torch_xla's planner removes the shard from that occurrence's plan.
    If one plan contains a shard twice, it thus removes both: with `data=2,fsdp=4`, the checkpoint would have no
    weights. This planner therefore removes duplicates within each plan first.
    """

    # torch passes `storage_meta`, torch_xla's method lacks it
    def set_up_planner(self, state_dict: Any, storage_meta: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_planner(state_dict, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        unique = {item.index: item for item in reversed(plan.items)}  # copies of a shard have equal indices
        return replace(plan, items=list(unique.values()))


def _to_shards(tensor: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec) -> torch.Tensor:
    # `+ 0` makes a copy: torch_xla sets the sharding on the tensor itself
    return xs.enable_manual_sharding(tensor + 0, axes, mesh=mesh).global_tensor


def _to_global(shard: torch.Tensor, mesh: xs.Mesh, axes: PartitionSpec) -> torch.Tensor:
    shape = torch.Size(size * shard_count(mesh, over) for size, over in zip(shard.shape, axes, strict=True))
    return xs.disable_manual_sharding(shard, axes, shape, mesh=mesh).global_tensor


_AUTOGRAD_XLA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradXLA)


@einsum.register_kernel("xla")
def _einsum(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # This kernel runs below autograd. There, `torch.einsum` would be torch's own, with reshapes: torch_xla registers
    # its einsum, a single dot operation of XLA, only for the autograd key. So dispatch to that key.
    return torch.ops.aten.einsum.default.redispatch(_AUTOGRAD_XLA, equation, [first, second])


def _reported_slices() -> set[Any]:
    """Return the slice indices that the devices report. Virtual devices report none."""
    return {device["slice_index"] for device in xr.global_runtime_device_attributes() if "slice_index" in device}


class XlaRuntime(Runtime):
    """The `Runtime` of PyTorch/XLA."""

    name = "PyTorch/XLA"
    plans_shapes = is_spmd = True
    _mesh: xs.Mesh  # set by `set_mesh`

    def __init__(self) -> None:
        """Turn SPMD on. If a device is already used, torch_xla warns, and replicates its tensors."""
        if not xr.is_spmd():
            device_choice.set_flags()
            xr.use_spmd()
        self._is_tpu = xr.device_type() == "TPU"
        self.has_attention_kernel = self._is_tpu and importlib.util.find_spec("jax") is not None

    @property
    def device(self) -> torch.device:
        return torch_xla.device()

    def topology(self) -> Topology:
        devices = xr.global_runtime_device_count()
        description = f"{devices} {xr.device_type()} device(s) through PyTorch/XLA SPMD"
        return Topology(devices, len(_reported_slices()) or 1, xr.process_index(), xr.process_count(), description)

    @contextmanager
    def accelerate_context(self) -> Iterator[None]:
        yield
        PartialState().local_process_index = 0  # accelerate sets -1 for the only process of a host

    set_device_arguments = staticmethod(set_tpu_arguments)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        kind = type(optimizer).__name__
        raise UserError(
            "On XLA the optimizer must be created after the weights are sharded, but `optimizers` holds an existing "
            f"optimizer: pass its class instead, `optimizer_cls_and_kwargs=({kind}, {{'lr': ...}})`."
        )

    def fit_loading_arguments(self, kwargs: dict[str, Any]) -> None:
        if kwargs.pop("device_map", None) is not None:
            logger.warning("`device_map` is ignored: on XLA the trainer places the model by its sharding plan.")

    def default_mesh(self, processes: int, *, is_asked: bool) -> tuple[str, int, int]:
        topology = self.topology()
        return "fsdp=-1", topology.devices, topology.slices

    def chip(self) -> str | None:
        with suppress(OSError, LookupError, TypeError):  # the machine's metadata and environment may lack the type
            return tpu.get_tpu_type().replace("v5litepod", "v5e") if xr.device_type() == "TPU" else None
        return None

    def peak_memory(self, device: torch.device) -> int | None:
        # torch_xla 2.9 cannot report the memory of devices under SPMD
        return super().peak_memory(device) if xr.device_type() == "CPU" else None

    @functools.cached_property
    def _saving_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        """Process group for the threads that write checkpoints, one process per host. Training uses the default group.

        The hosts connect by gloo. torch_xla's ``rendezvous`` is not a barrier under SPMD, because each host counts as
        the only process (https://github.com/pytorch/xla/issues/9479). The address of process 0 comes from the TPU's
        environment, or from MASTER_ADDR and MASTER_PORT.
        """
        if xr.process_count() == 1:
            return None
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="xla://", timeout=COLLECTIVE_TIMEOUT)
        return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        names, shape, reported_slices = tuple(sizes), tuple(sizes.values()), len(_reported_slices())
        if reported_slices and reported_slices != slices:
            raise UserError(
                f"The mesh is for {slices} slice(s), but the devices are in {reported_slices}. Set "
                f"slices={reported_slices}, or leave `slices` out: the default is read from the devices."
            )
        if reported_slices > 1:
            within, across = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
            self._mesh = xs.HybridMesh(ici_mesh_shape=within, dcn_mesh_shape=across, axis_names=names)
        else:
            self._mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), shape, names)
        xs.set_global_mesh(self._mesh)

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        if tensor.device.type == "xla":
            xs.mark_sharding(tensor, self._mesh, axes)
            return tensor
        # If no dimension of a partition spec is None, torch_xla 2.9's ShardingSpec assumes that the spec names every
        # axis, and shards wrongly if it does not (https://github.com/pytorch/xla/issues/8012). The mesh's own method
        # handles this case. It needs at least one dimension, and a scalar has none.
        sharding = self._mesh._get_op_sharding_args(axes or (None,))
        spec = torch_xla._XLAC.XlaShardingSpec(tensor, *sharding, False)
        return torch_xla._XLAC._xla_tensors_from_aten([tensor.detach()], [str(device)], [spec])[0]

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        mesh = self.mesh_of(tensor)
        if mesh is None:
            return tensor
        dividing = tuple(
            None if size % shard_count(mesh, over) else over for size, over in zip(tensor.shape, axes, strict=True)
        )
        if torch_xla._XLAC._get_xla_sharding_spec(tensor):
            tensor = tensor + 0  # a tensor keeps its first sharding, but a result computed from it can have another
        change = functools.partial(_constrained_copy, mesh=mesh, axes=dividing)
        constrained: torch.Tensor = ChangeSharding.apply(tensor, change, change)
        return constrained

    def mesh_of(self, tensor: torch.Tensor) -> xs.Mesh | None:
        """Return the mesh of a device tensor; None for a host tensor, or before `set_mesh`."""
        return getattr(self, "_mesh", None) if tensor.device.type == "xla" else None

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        xm.optimization_barrier_(list(tensors))

    def segment_attention(self, q_BHLD: torch.Tensor, *others: Any) -> torch.Tensor:  # type: ignore[override]
        if not self.has_attention_kernel or q_BHLD.device.type != "xla":
            return super().segment_attention(q_BHLD, *others)
        from .splash import splash_attention

        return splash_attention(q_BHLD, *others)

    def shard_map(
        self, function: Callable[..., Any], tensors: Any, axes: Sequence[PartitionSpec], result_axes: PartitionSpec
    ) -> torch.Tensor:
        mesh = self.mesh_of(tensors[0])
        if mesh is None:
            return function(*tensors)
        # keep an entry of ``axes`` only if it has several devices and divides all dimensions that are sharded over it
        dimensions = [
            pair for tensor, spec in zip(tensors, axes, strict=True) for pair in zip(spec, tensor.shape, strict=True)
        ]
        counts = {over: shard_count(mesh, over) for over, _ in dimensions}
        dividing = counts.keys() - {over for over, size in dimensions if counts[over] == 1 or size % counts[over]}

        def changes(spec: PartitionSpec) -> list[ShardingChange]:
            kept = tuple(over if over in dividing else None for over in spec)
            return [functools.partial(change, mesh=mesh, axes=kept) for change in (_to_shards, _to_global)]

        shards = [ChangeSharding.apply(tensor, *changes(spec)) for tensor, spec in zip(tensors, axes, strict=True)]
        to_shards, to_global = changes(result_axes)
        return ChangeSharding.apply(function(*shards), to_global, to_shards)

    def activations_on_host(self) -> AbstractContextManager[Any]:
        # on a CPU, device memory is host memory
        return OnHost() if self._is_tpu else nullcontext()

    def _checkpoint_function(self, layer: nn.Module, policy: Remat) -> Callable[..., Any]:
        return functools.partial(recompute, layer, policy)

    scan = scan_layers

    def loop(self, step: LoopStep, carry: Any, slices: Any, *, reverse: bool = False) -> Any:
        if slices[0].device.type == "cpu":  # host tensors, before training
            return super().loop(step, carry, slices, reverse=reverse)
        return _scan_impl_flat(step, carry, slices, reverse)

    def upload(self, tensor: torch.Tensor, batch_axes: tuple[str, ...], device: torch.device) -> torch.Tensor:
        """Copy a tensor of a batch, sharded by token rows; replicated if it has one dimension or is not divisible.

        torch_xla selects the token rows of this host's devices by the devices' places in the mesh. Its ``minibatch``
        option would instead select them in the order of device numbers. That is wrong if a host's numbers are not
        consecutive: with 4x4 chips, the first host has devices 0, 1, 4 and 5.
        """
        count = shard_count(self._mesh, batch_axes)
        if tensor.dim() < 2 or count == 1 or tensor.shape[0] % count:
            return self.to_device(tensor, device)
        return self.place(tensor, (batch_axes, *([None] * (tensor.dim() - 1))), device)

    def step_boundary(self, wait: bool = False) -> None:
        torch_xla.sync(wait=wait)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return xm.send_cpu_data_to_device([tensor], device)[0]  # type: ignore[index]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        self.step_boundary(wait=True)  # reading a shard while it is computed fails
        unique = {str(id(tensor)): tensor.detach() for tensor in state.values()}
        copies = {
            key: HostShards(copy.shards, copy.global_shape) if isinstance(copy, _CpuShards) else copy
            for key, copy in _sharded_cpu_state_dict(unique).items()
        }
        return {name: copies[str(id(tensor))] for name, tensor in state.items()}

    def checkpoint_arguments(self, *, saves: bool) -> dict[str, Any]:
        return super().checkpoint_arguments(saves=saves) | {"planner": SavePlanner() if saves else SPMDLoadPlanner()}

    def read_count(self) -> int:
        return (met.metric_data("TransferFromDeviceTime") or [0])[0]

    def use_exact_products(self) -> None:
        set_mat_mul_precision("highest")

    def compile_count(self) -> int:
        return (met.metric_data("CompileTime") or [0])[0]
