"""PyTorch/XLA through SPMD: one process drives every device of the host as one mesh.

References: https://docs.pytorch.org/xla/release/r2.9/perf/spmd_basic.html
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend  # knows the address "xla://"
import torch_xla.runtime as xr
from torch import nn
from torch.utils.data import DataLoader
from torch_xla._internal import tpu

from ..errors import UserError
from . import libtpu, shards
from .base import PATIENCE, PartitionSpec, Planners, Remat, Topology
from .kernels.plain import einsum, segment_attention
from .layout import MeshSharding, laid_out, shard_count
from .native import DeviceLoader, Runtime, peak_resident_bytes
from .remat import recompute
from .scan import OnHost, scan_layers
from .shard_map import on_shards

_AUTOGRAD_XLA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradXLA)


@einsum.register_kernel("xla")
def _einsum(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # below autograd torch would take its own einsum, of reshapes; torch_xla's one dot is registered with autograd's
    return torch.ops.aten.einsum.default.redispatch(_AUTOGRAD_XLA, equation, [first, second])


def _reported_slices() -> set[Any]:
    """Return the slices that the devices say they are in; virtual devices say nothing."""
    return {each["slice_index"] for each in xr.global_runtime_device_attributes() if "slice_index" in each}


class XlaRuntime(Runtime):
    """The `Runtime` of PyTorch/XLA."""

    plans_shapes = records_steps = shares_mesh = True
    _mesh: xs.Mesh  # of `set_mesh`

    def __init__(self) -> None:
        """Turn SPMD on, which torch_xla cannot do later.

        Raises:
            RuntimeError: A device was used before.
        """
        if xr.is_spmd():
            return
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():
            raise RuntimeError(
                "An XLA device was used before the trainer could turn SPMD on, and torch_xla cannot change that in a "
                "running process. Import trl_tpu's RewardTrainer (or make its RewardConfig) before the first tensor, "
                "Accelerator or TrainingArguments touches the device, or call torch_xla.runtime.use_spmd() first."
            )
        libtpu.set_flags()
        xr.use_spmd()

    @property
    def has_attention_kernel(self) -> bool:
        return xr.device_type() == "TPU" and importlib.util.find_spec("jax") is not None

    @property
    def device(self) -> torch.device:
        return torch_xla.device()

    def topology(self) -> Topology:
        devices = xr.global_runtime_device_count()
        return Topology(
            devices=devices,
            slices=len(_reported_slices()) or 1,
            process_index=xr.process_index(),
            process_count=xr.process_count(),
            description=f"{devices} {xr.device_type()} device(s) through PyTorch/XLA SPMD",
        )

    def chip(self) -> str | None:
        if xr.device_type() != "TPU":
            return None
        try:
            return tpu.get_tpu_type()
        except (OSError, LookupError, TypeError):  # neither the machine's metadata nor the environment says it
            return None

    def most_memory(self, device: torch.device) -> int | None:
        # of devices that SPMD joins to one torch_xla 2.9 cannot say it
        return peak_resident_bytes() if xr.device_type() == "CPU" else None

    @functools.cached_property
    def _saving_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        """The group of all hosts' threads that write checkpoints; training goes on in the default one.

        torch_xla's ``rendezvous`` is no barrier under SPMD, where every host counts as the only one
        (https://github.com/pytorch/xla/issues/9479). So the hosts meet over gloo, at the address of process 0, which
        the TPU's environment says, or MASTER_ADDR and MASTER_PORT.
        """
        if xr.process_count() == 1:
            return None
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="xla://", timeout=PATIENCE)
        return dist.new_group(backend="gloo", timeout=PATIENCE)

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        names, shape, reported = tuple(sizes), tuple(sizes.values()), len(_reported_slices())
        if reported and reported != slices:
            raise UserError(
                f"The mesh is for {slices} slice(s), but the devices are in {reported}: slices={reported}, or leave "
                "`slices` out, which is read from the devices."
            )
        if reported > 1:
            within, across = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
            self._mesh = xs.HybridMesh(ici_mesh_shape=within, dcn_mesh_shape=across, axis_names=names)
        else:
            self._mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), shape, names)
        xs.set_global_mesh(self._mesh)

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        if tensor.device.type == "xla":
            xs.mark_sharding(tensor, self._mesh, axes)
            return tensor
        return xm.send_cpu_data_to_device([tensor.detach()], device, MeshSharding(self._mesh, axes))[0]  # type: ignore[index]

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        mesh = self.mesh_of(tensor)
        return tensor if mesh is None else laid_out(tensor, mesh, axes)

    def mesh_of(self, tensor: torch.Tensor) -> xs.Mesh | None:
        """Return the mesh that a tensor lies on; None on the host, or outside a trainer."""
        return getattr(self, "_mesh", None) if tensor.device.type == "xla" else None

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        xm.optimization_barrier_(list(tensors))

    @functools.cached_property
    def attention_kernel(self) -> Callable[..., torch.Tensor]:
        """Splash attention on a TPU; compiling for a TPU elsewhere sets this to `splash.splash_attention`."""
        if xr.device_type() != "TPU":
            return segment_attention
        from .kernels.splash import splash_attention  # imports jax, which must not come before torch_xla has the TPU

        return splash_attention

    def segment_attention(self, q_BHLD: torch.Tensor, *others: Any) -> torch.Tensor:  # type: ignore[override]
        kernel = self.attention_kernel if q_BHLD.device.type == "xla" else segment_attention
        return kernel(q_BHLD, *others)

    shard_map = on_shards

    def activations_on_host(self) -> AbstractContextManager[Any]:
        # torch_xla moves nothing on a CPU, whose devices have the host's memory
        return OnHost() if xr.device_type() == "TPU" else nullcontext()

    def _recomputing(self, layer: nn.Module, policy: Remat) -> Callable[..., Any]:
        return functools.partial(recompute, layer, policy)

    scan = scan_layers

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> DeviceLoader:
        return DeviceLoader(self, batches, functools.partial(self._upload_batch, batch_axes))

    def _upload_batch(self, batch_axes: tuple[str, ...], tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor of a batch to the devices: rows of tokens over the batch axes; lists of numbers, and rows that
        the axes do not divide, whole to each.

        torch_xla cuts out what this host's devices hold by their places in the mesh. Its ``minibatch`` would instead
        deal the host's rows out by device number, and hosts' devices are no runs of numbers: of 4x4 chips the first
        host has 0, 1, 4 and 5.
        """
        count = shard_count(self._mesh, batch_axes)
        if tensor.dim() < 2 or count == 1 or tensor.shape[0] % count:
            return self.to_device(tensor, device)
        return self.place(tensor, (batch_axes, *([None] * (tensor.dim() - 1))), device)

    def step_boundary(self) -> None:
        torch_xla.sync()

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return xm.send_cpu_data_to_device([tensor], device)[0]  # type: ignore[index]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return shards.local_shards(state)

    def checkpoint_planners(self) -> Planners:
        return Planners(shards.SavePlanner(), shards.LoadPlanner(), self._saving_group)

    def compile_count(self) -> int:
        compiles = met.metric_data("CompileTime")
        return compiles[0] if compiles else 0
