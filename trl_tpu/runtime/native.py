"""The device interface of the trainer, implemented in plain torch for CPUs and CUDA devices."""

import atexit
import functools
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import DataLoader
from transformers.utils import is_torch_bf16_gpu_available

#: The mesh axis or axes over which each dimension of a tensor is sharded; None for an unsharded dimension.
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]

#: Timeout of collectives: processes wait while process 0 writes a large model to slow storage.
COLLECTIVE_TIMEOUT = timedelta(hours=2)

Value = TypeVar("Value")
LoopStep = Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[list[torch.Tensor], list[torch.Tensor]]]


@atexit.register
def _let_threads_of_groups_finish() -> None:
    # A thread of gloo that frees a tensor while Python ends aborts the process: pytorch/pytorch#190489
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        time.sleep(0.2)


class Remat(StrEnum):
    """Recomputation in a layer's backward: nothing, everything, or everything except matrix products."""

    NONE = "none"
    FULL = "full"
    DOTS = "dots"


@dataclass(frozen=True)
class Topology:
    """The devices and processes that train together.

    Attributes:
        devices: Number of devices in the mesh.
        slices: Number of TPU slices: groups of devices that are connected by a slower network.
        process_count: Number of processes that share the mesh: on a TPU pod, one per host.
        description: Description of the devices, for the log.
    """

    devices: int
    slices: int
    process_index: int
    process_count: int
    description: str


def _einsum(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `torch.einsum` of two tensors. Each letter must occur in at least two of the factors and the result.

    A custom operation, because recomputation must be able to keep its result: torch_xla's einsum is invisible below
    autograd, and torch's einsum merges dimensions with different shardings.
    """
    return torch.einsum(equation, first, second).contiguous()


def _save_factors(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.equation, *factors = inputs
    ctx.save_for_backward(*factors)


def _einsum_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    first, second = ctx.saved_tensors
    letters, result = ctx.equation.split("->")
    left, right = letters.split(",")
    return (
        None,
        einsum(f"{result},{right}->{left}", gradient, second) if ctx.needs_input_grad[1] else None,
        einsum(f"{result},{left}->{right}", gradient, first) if ctx.needs_input_grad[2] else None,
    )


einsum = torch.library.custom_op("trl_tpu::einsum", _einsum, mutates_args=())
einsum.register_fake(_einsum)
einsum.register_autograd(_einsum_backward, setup_context=_save_factors)

_aten = torch.ops.aten
#: All operations that multiply matrices.
MATMULS = frozenset(
    {_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, torch.ops.trl_tpu.einsum.default}
)


def segment_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    segment_BL: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within the segments of each token row, [B, H, L, D].

    Args:
        q_BHLD, k_BGLD, v_BGLD: Queries, keys and values; H is a multiple of G.
        segment_BL: Segment number of each token. A token sees only tokens with the same number.
        scale: Factor of the logits.
        window: Number of columns that a token sees, its own column included; None for all.
        softcap: Bound of the logits, applied by tanh; None for no bound.
    """
    column = torch.arange(segment_BL.shape[1], device=segment_BL.device)
    before_LL = column[:, None] - column[None, :]
    seen_LL = before_LL >= 0 if window is None else (before_LL >= 0) & (before_LL < window)
    mask_B1LL = (segment_BL[:, None, :, None] == segment_BL[:, None, None, :]) & seen_LL
    return masked_attention(q_BHLD, k_BGLD, v_BGLD, mask_B1LL, scale, softcap)


def masked_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    mask_B1LL: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention with a boolean mask, [B, H, L, D]. The output of a query without visible keys is undefined.

    Args:
        q_BHLD, k_BGLD, v_BGLD, scale, softcap: See `segment_attention`.
        mask_B1LL: True if a query sees a key.
    """
    groups = q_BHLD.shape[1] // k_BGLD.shape[1]
    if groups > 1:
        k_BGLD, v_BGLD = k_BGLD.repeat_interleave(groups, 1), v_BGLD.repeat_interleave(groups, 1)
    if softcap is None:
        return scaled_dot_product_attention(q_BHLD, k_BGLD, v_BGLD, attn_mask=mask_B1LL, scale=scale)
    logits_BHLL = (q_BHLD @ k_BGLD.mT * scale / softcap).tanh() * softcap
    wide = torch.promote_types(logits_BHLL.dtype, torch.float32)
    weights_BHLL = logits_BHLL.masked_fill(~mask_B1LL, -torch.inf).softmax(-1, dtype=wide)
    return weights_BHLL.to(v_BGLD.dtype) @ v_BGLD


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Let this thread's CPU compute with zero for numbers below 1e-38 while the context is open, as TPUs do.

    Recurrent layers' gradients decay from token to token, and a CPU multiplies such numbers up to 100 times slower.
    Threads that torch starts meanwhile do the same; running threads do not change.
    """
    flushed = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process on the host, in bytes.

    On Linux, `getrusage` is not used if possible: its value is at least the memory of the parent process.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (peak_kib := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(peak_kib[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, all others KiB


def set_tpu_arguments(args: Any) -> None:
    """Set training arguments that depend on a TPU: see `Runtime.set_device_arguments`."""
    args.dataloader_pin_memory = False  # batches are small, and not every host supports pinning
    if args.bf16 is None:
        args.bf16 = not args.fp16
    if args.optim == "adamw_torch_fused":
        args.optim = "adamw_torch"  # XLA fuses the update itself; for TorchTPU see `fuse`


class DeviceLoader:
    """Yields batches on the device. The recorded step ends before each batch, so one training step is one execution.

    A device that runs asynchronously computes a step while the host makes and copies the next batch. Each process
    passes batches with all token rows, but copies only its devices'. All others may hold arbitrary values.

    Args:
        runtime: The runtime that copies tensors to the device.
        batches: Loader of batches on the host.
        batch_axes: Mesh axes over which the first dimension of a batch is sharded.
    """

    def __init__(self, runtime: "Runtime", batches: DataLoader, batch_axes: tuple[str, ...]) -> None:
        self.runtime, self.batches, self._batch_axes = runtime, batches, batch_axes

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[Any]:
        self.runtime.step_boundary()
        upload = functools.partial(self.runtime.upload, batch_axes=self._batch_axes, device=self.runtime.device)
        for batch in self.batches:
            # a `Batch` of this package's collators, or what another collator returns
            yield batch.map_tensors(upload) if hasattr(batch, "map_tensors") else recursively_apply(upload, batch)
            self.runtime.step_boundary()


class Runtime:
    """The device interface of the trainer, in plain torch. `XlaRuntime` implements it in PyTorch/XLA.

    One process drives one device. Launchers start several processes. Either each process has a full model and a mesh
    of one device, or all processes shard one model over one mesh. The constructor does all initialization that must
    happen before a device is used.

    Attributes:
        plans_shapes: True if batches should have a few planned shapes, since each new shape is compiled.
        is_spmd: True if one process drives all devices of its host, and steps are recorded and partitioned by the
            compiler. On SPMD devices, reading a value stops the device, and values that change from step to step must
            be tensors. Without SPMD, each process has one device, and accelerate manages the processes.
        has_attention_kernel: True if `segment_attention` needs less memory than a mask per query and key.
        copies: Number of processes in a `tensor` group: all of them compute the same rows of the data.
        segment_attention: Computes causal attention within segments with the device's best kernel.
    """

    name = "plain torch"
    plans_shapes = False
    is_spmd = False
    has_attention_kernel = False
    copies = 1

    _ranks = 1  # processes of the mesh, one per device
    _saving_group: dist.ProcessGroup | None = None  # the mesh's processes, for host tensors and checkpoint threads

    @property
    def shards_model(self) -> bool:
        """True if one model is sharded over processes or devices. Each process then makes the batches of all."""
        return self.is_spmd or self._ranks > 1

    @property
    def _rank(self) -> int:
        """Index of this process in the mesh."""
        return dist.get_rank() if self._ranks > 1 else 0

    @property
    def batch_part(self) -> tuple[int, int]:
        """Index of this process's part of a batch, and the number of parts; (0, 1) if it computes whole batches."""
        return self._rank // self.copies, self._ranks // self.copies

    def counts_rows(self) -> bool:
        """Return whether this process counts its data rows: a `tensor` group shares them, so one process counts."""
        return self._rank % self.copies == 0

    # ---- devices and processes

    @property
    def device(self) -> torch.device:
        """The device of this process. With SPMD, one virtual device represents all devices of the mesh."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def topology(self) -> Topology:
        """Return the current devices and processes of the mesh. Several processes shard one model."""
        name = self._device_name()
        if self._ranks > 1:
            name = f"{self._ranks} processes, each on {name}"
        return Topology(self._ranks, 1, process_index=self._rank, process_count=self._ranks, description=name)

    def _device_name(self) -> str:
        threads = f"CPU, {(count := torch.get_num_threads())} thread{'s' * (count > 1)}"
        return torch.cuda.get_device_name() if torch.cuda.is_available() else threads

    def accelerate_context(self) -> AbstractContextManager[None]:
        """Return a context for starting accelerate, to let it detect this runtime's device and processes."""
        return nullcontext()

    def chip(self) -> str | None:
        """Return the name of the TPU generation, such as "v6e" or "v5e"; None if the devices are not TPUs."""
        return None

    def peak_memory(self, device: torch.device) -> int | None:
        """Return the peak memory use of a device of this process, in bytes; None if unknown.

        On a CPU, it is the memory of the whole process. The call does not stop the device.
        """
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return peak_resident_bytes()

    def all_gather_object(self, value: Value, while_saving: bool = False) -> list[Value]:
        """Gather one small value from each process of the mesh, in the order of ranks. With None, it is a barrier.

        All processes must call it. Threads that write a checkpoint set ``while_saving``: they use another process
        group, so their collectives cannot mix with training's collectives.
        """
        group, count = self._saving_group, self.topology().process_count
        if count == 1:
            return [value]
        gathered = [value] * count
        dist.all_gather_object(gathered, value, group=group if while_saving else None)
        return gathered

    # ---- settings

    def set_device_arguments(self, args: Any) -> None:
        """Set training arguments that depend on the device, before transformers reads them."""
        if args.bf16 is None:
            args.bf16 = (args.use_cpu or is_torch_bf16_gpu_available()) and not args.fp16
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION")  # as in transformers, `bf16` and `fp16` come first
        if launched in ("bf16", "fp16") and not (args.bf16 or args.fp16):
            setattr(args, launched, True)
        if not torch.accelerator.is_available():
            args.dataloader_pin_memory = False  # without an accelerator, torch would warn
            # Without `use_cpu`, accelerate forms no group of torchrun's processes, and each process trains alone.
            args.use_cpu |= int(os.environ.get("WORLD_SIZE") or 1) > 1

    def fit_loading_arguments(self, kwargs: dict[str, Any]) -> None:
        """Reject or remove arguments of ``from_pretrained`` that the device does not support."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Reject an optimizer that was created before the model was placed, if the device does not support that."""

    def default_mesh(self, processes: int, *, is_asked: bool) -> tuple[str, int, int]:
        """Return the default mesh as text, its number of devices and its number of slices.

        Args:
            processes: Number of processes, from accelerate.
            is_asked: Whether the user sets a mesh.
        """
        # With DDP, each process chooses the shapes of its batches. On a compiling device all must choose the same.
        return "data=-1", processes if is_asked or self.plans_shapes else 1, 1

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        """Arrange all devices as a mesh of named axes. The product of the sizes is `Topology.devices`.

        The first axis is split over the ``slices``. In plain torch, the mesh is one device or one device per process.

        Raises:
            UserError: The devices are in another number of slices.
        """
        self._ranks, self.copies = prod(sizes.values()), sizes["tensor"]
        if self._ranks > 1 and dist.is_initialized() and self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    # ---- layouts

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        """Shard ``tensor`` over the mesh: dimension d over the axes ``axes[d]``; None leaves a dimension unsharded.

        A host tensor is copied directly to its shards; a device tensor is sharded in place.
        """
        return tensor.to(device)

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        """Let the compiler shard the activation ``tensor`` and its gradient by ``axes``, as in `place`.

        Axes that do not divide their dimension are left out. In plain torch, a sharded activation becomes unsharded.
        """
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def shard_map(
        self,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
        axes: Sequence[PartitionSpec],
        result_axes: PartitionSpec,
    ) -> torch.Tensor:
        """Call ``function`` on each device with its shards of ``tensors``. It returns the result's shard.

        Use it if the compiler cannot see that the shards are independent.

        Args:
            function: A function that is correct for any shards.
            tensors: The unsharded arguments.
            axes: Mesh axes of each dimension of each tensor. An axis must divide all of its dimensions; otherwise it
                is left out everywhere.
            result_axes: Mesh axes of each dimension of the result.
        """
        return function(*tensors)

    # ---- to and from the host

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a small host tensor to the device, as an input of programs.

        The tensor needs at least one dimension: XLA turns the scalars 0 and 1 into constants of the program.
        """
        return tensor.to(device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy small device tensors to the host, with a single stop of the device."""
        return [tensor.detach().cpu() for tensor in tensors]

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Copy this process's shards of named tensors to the host. Tied tensors are copied once.

        Returns:
            The shards of each tensor. ``shards[index]`` gives the shards of the tensor's row ``index``, if the first
            dimension is not sharded. ``shards.join()`` gives the full tensor, if this process has all shards. Tensors
            without shards are returned as host tensors.
        """
        copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in state.values()}
        return {name: copies[id(tensor)] for name, tensor in state.items()}

    def checkpoint_arguments(self, *, saves: bool) -> dict[str, Any]:
        """Return arguments for torch's `dcp.save` of `local_shards`, or for `dcp.load` into device tensors.

        All processes of the group save and load together, from any thread. Without a group, one process works alone.
        """
        group = self._saving_group if self.topology().process_count > 1 else None
        return {"process_group": group, "no_dist": group is None}

    def upload(self, tensor: torch.Tensor, batch_axes: tuple[str, ...], device: torch.device) -> torch.Tensor:
        """Copy a tensor of a batch to the devices: token rows sharded over the batch axes, others replicated."""
        return tensor.to(device, non_blocking=tensor.is_pinned())  # copies of pinned memory need not wait

    # ---- steps

    def step_boundary(self, wait: bool = False) -> None:
        """End the recorded step: all operations since the last boundary become one execution.

        Plain torch executes operations immediately.

        Args:
            wait: Whether to wait for the execution.
        """

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of tensors and modules into one program per shape, if the device gains by that.

        Plain torch returns it unchanged. On XLA it becomes part of the recorded step.
        """
        return function

    def read_count(self) -> int | None:
        """Return how many tensors were read from the devices so far; None where nothing counts them."""
        return None

    def use_exact_products(self) -> None:
        """Compute products of float32 matrices in full precision. TPUs round their factors by default."""
        torch.set_float32_matmul_precision("highest")

    def compile_count(self) -> int | None:
        """Return the number of programs compiled so far; None on devices that do not compile."""
        return None

    def fuse(self, optimizer: Optimizer) -> None:
        """Let an optimizer use a fused kernel, if the device gains by that."""

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """Delay all uses of ``tensors`` until all of them are computed. The tensors are changed in place.

        Plain torch runs operations in order, so there is nothing to do.
        """

    def activations_on_host(self) -> AbstractContextManager[Any]:
        """Return a context in which a forward saves the tensors for the backward in host memory.

        Recomputed layers save only their inputs. On XLA, only the layers of a loop save their inputs on the host.
        """
        return save_on_cpu(pin_memory=torch.cuda.is_available())

    def recompute_layers(self, model: nn.Module, policy: Remat) -> None:
        """Let layers that transformers marked for activation checkpointing recompute in a way the device supports.

        With "dots", results of matrix products are kept, not recomputed.
        """
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = self._checkpoint_function(module, policy)

    def _checkpoint_function(self, layer: Any, policy: Remat) -> Any:
        """Return a function that replaces `torch.utils.checkpoint.checkpoint` for the calls of ``layer``."""
        if policy != Remat.DOTS:  # transformers' default, torch's checkpoint, works in plain torch
            return layer._gradient_checkpointing_func
        keep = functools.partial(create_selective_checkpoint_contexts, list(MATMULS))
        return functools.partial(layer._gradient_checkpointing_func, use_reentrant=False, context_fn=keep)

    def scan(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run identical layers as one compiled loop: see `layer_loop.scan_layers`."""
        raise NotImplementedError("Plain torch runs layers one by one: it does not compile, so a loop would not help.")

    def loop(
        self, step: LoopStep, carry: list[torch.Tensor], slices: list[torch.Tensor], *, reverse: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Call ``step`` for each index of the first dimension of ``slices``. No gradients are recorded.

        Args:
            step: Takes the carry and one slice of each tensor; returns the new carry and its results.
            carry: Initial carry.
            slices: Tensors with the same first dimension.
            reverse: Whether to iterate from the last index to the first.

        Returns:
            The final carry, and the results of all calls, stacked in the order of ``slices``.
        """
        results = list[list[torch.Tensor]]()
        for index in range(len(slices[0]))[:: -1 if reverse else 1]:
            carry, outputs = step(carry, [tensor[index] for tensor in slices])
            results.append(outputs)
        return carry, [torch.stack(outputs[:: -1 if reverse else 1]) for outputs in zip(*results, strict=True)]

    segment_attention = staticmethod(segment_attention)
