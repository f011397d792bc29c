"""What the trainer needs of a device, and how plain torch gives it: on a CPU or a CUDA device."""

import functools
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import DataLoader
from transformers.utils import is_torch_bf16_gpu_available

from ..errors import UserError

#: The mesh axis or axes that each dimension of a tensor goes over, None meaning none.
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]

#: How long processes wait for one that is busy: the first writes a large model to slow storage.
PATIENCE = timedelta(hours=2)

Value = TypeVar("Value")
LoopStep = Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[list[torch.Tensor], list[torch.Tensor]]]


class Remat(StrEnum):
    """What a layer's backward computes again: nothing, all, or all but its matrix products."""

    NONE = "none"
    FULL = "full"
    DOTS = "dots"

    @classmethod
    def parse(cls, value: str) -> "Remat":
        """Read what a user writes.

        Raises:
            UserError: If it is none of the three.
        """
        if value not in list(cls):
            raise UserError(f"remat must be 'full', 'dots' or 'none', got {value!r}.")
        return cls(value)


@dataclass(frozen=True)
class Topology:
    """The devices and processes that train together."""

    devices: int
    """All devices of the mesh."""
    slices: int
    """Groups of devices that a slower network joins."""
    process_index: int
    process_count: int
    """Processes that share the mesh: on a pod there is one a host."""
    description: str
    """What the devices are, for the log."""


@torch.library.custom_op("trl_tpu::einsum", mutates_args=())
def einsum(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `torch.einsum` of two tensors, each letter of one being in the other or in the result.

    An operation of its own, so that it can be kept when a layer is recomputed: torch_xla's einsum is not seen below
    autograd, and torch's own joins dimensions that are sharded apart.
    """
    return torch.einsum(equation, first, second).contiguous()


@einsum.register_fake
def _(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, first, second).contiguous()


def _keep_factors(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.equation, *factors = inputs
    ctx.save_for_backward(*factors)


def _einsum_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    first, second = ctx.saved_tensors
    letters, result = ctx.equation.split("->")
    one, two = letters.split(",")
    return (
        None,
        einsum(f"{result},{two}->{one}", gradient, second) if ctx.needs_input_grad[1] else None,
        einsum(f"{result},{one}->{two}", gradient, first) if ctx.needs_input_grad[2] else None,
    )


einsum.register_autograd(_einsum_backward, setup_context=_keep_factors)

_aten = torch.ops.aten
#: Every operation that multiplies matrices.
MATMULS = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        torch.ops.trl_tpu.einsum.default,
    }
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
    """Compute causal attention within the segments of each row, [B, H, L, D].

    Args:
        q_BHLD, k_BGLD, v_BGLD: Queries, keys and values; H is a multiple of G.
        segment_BL: A token sees those with its own number only.
        scale: Of the logits.
        window: How many tokens a token sees, itself among them, counted in columns; None for all.
        softcap: The bound that tanh puts on the logits; None for none.
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
    """Compute attention under a boolean mask, [B, H, L, D]. A query that may see nothing gives no number.

    Args:
        q_BHLD, k_BGLD, v_BGLD, scale, softcap: As in `segment_attention`.
        mask_B1LL: True where a query sees a key.
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


def peak_resident_bytes() -> int:
    """Return the most memory that this process ever had in use on the host.

    Linux says it to `getrusage`, too, but there it is at least what the process that started this one had in use.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (said := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(said[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB


class DeviceLoader:
    """Batches on the device. Iterating ends the recorded step before each, which makes one step one execution.

    A device that runs steps beside the host computes one while the next batch is made and copied.

    Args:
        runtime: Copies tensors to the device.
        batches: Batches on the host.
        batch_axes: The mesh axes of a batch's first dimension.
    """

    def __init__(self, runtime: "Runtime", batches: DataLoader, batch_axes: tuple[str, ...]) -> None:
        self.runtime, self.batches, self._batch_axes = runtime, batches, batch_axes

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[Any]:
        self.runtime.step_boundary()
        for batch in self.batches:
            yield self.upload(batch, self.runtime.device)
            self.runtime.step_boundary()

    def upload(self, value: Any, device: torch.device) -> Any:
        """Return a batch, or a part of it, with its tensors on the device."""
        if isinstance(value, dict):
            return type(value)({key: self.upload(part, device) for key, part in value.items()})
        if type(value) in (tuple, list):
            return type(value)(self.upload(part, device) for part in value)
        if hasattr(value, "map_tensors"):  # our collators'
            return value.map_tensors(lambda tensor: self.upload(tensor, device))
        is_tensor = isinstance(value, torch.Tensor)
        return self.runtime.upload(value, self._batch_axes, device) if is_tensor else value

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for ``epoch``: samplers order their pairs by (seed, epoch)."""
        parts: tuple[Any, ...] = (getattr(self.batches.batch_sampler, "sampler", None), self.batches.dataset)
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


class Runtime:
    """What the trainer needs of a device, in plain torch; `XlaRuntime` gives each of it in PyTorch/XLA.

    One process drives one device. Launchers add more processes: each has a mesh of its one device and a whole model,
    or all have parts of one model on one mesh. Making a runtime gets ready whatever has to be before anything touches
    a device.
    """

    plans_shapes = False
    """Whether batches should have a few planned shapes, since each new one is compiled."""

    is_spmd = False
    """Whether one process drives all devices of its host, and steps are recorded and partitioned by the compiler.

    Reading a value stops such devices, and what differs from step to step has to be data. Else a process has one
    device, and accelerate leads the processes.
    """

    name = "plain torch"

    copies = 1
    """Processes of a `tensor` group: they compute the same pairs."""

    _ranks = 1  # processes of the mesh, one a device
    _saving_group: dist.ProcessGroup | None = None  # the same, for host tensors and threads beside training

    @property
    def shards_model(self) -> bool:
        """Whether processes, or one process's devices, have parts of one model: each makes the batches of all."""
        return self.is_spmd or self._ranks > 1

    @property
    def has_attention_kernel(self) -> bool:
        """Whether `segment_attention` needs less memory than a mask for each query and key."""
        return False

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of a batch this process computes, and how many parts there are, where processes have parts."""
        if self._ranks == 1:
            return 0, 1
        return dist.get_rank() // self.copies, self._ranks // self.copies

    def counts_pairs(self) -> bool:
        """Return whether this process counts its pairs: of a `tensor` group, whose pairs are the same, one does."""
        return self.copies == 1 or dist.get_rank() % self.copies == 0

    # ---- devices and processes

    @property
    def device(self) -> torch.device:
        """The device of this process: where several form a mesh, the one that stands for all of them."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def topology(self) -> Topology:
        """Return the devices and processes of the mesh, as they are now: of several, each has a part of the model."""
        name = self._device_name()
        if self._ranks == 1:
            return Topology(1, slices=1, process_index=0, process_count=1, description=name)
        name = f"{self._ranks} processes, each on {name}"
        return Topology(self._ranks, 1, process_index=dist.get_rank(), process_count=self._ranks, description=name)

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"

    def known_to_accelerate(self) -> AbstractContextManager[None]:
        """Return a context in which accelerate finds the device and the processes, where it is started."""
        return nullcontext()

    def chip(self) -> str | None:
        """Return what the devices are called where TPUs are rented, such as "v6e"; None if they are none."""
        return None

    def most_memory(self, device: torch.device) -> int | None:
        """Return the most bytes that were ever in use on a device of this process; None where nothing says so.

        On a CPU they are those of the whole process. Asking stops no device.
        """
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return peak_resident_bytes()

    def all_gather_object(self, value: Value, while_saving: bool = False) -> list[Value]:
        """Return what each process of the mesh gives, in their order. Of None it is a barrier.

        All processes take part, with small values. Threads that write a checkpoint ask ``while_saving``, so that their
        words are not taken for those of training.
        """
        group, count = self._saving_group, self.topology().process_count
        if count == 1:
            return [value]
        gathered = [value] * count
        dist.all_gather_object(gathered, value, group=group if while_saving else None)
        return gathered

    def process_index(self, index: int) -> int:
        """Return the number of this process among those that write: ``index`` where accelerate counts them."""
        return index

    def is_first_of_host(self, local_index: int) -> bool:
        """Return whether this process writes for its host."""
        return local_index == 0

    # ---- settings

    def settle_arguments(self, args: Any) -> None:
        """Set what the device decides of the training's arguments, before transformers reads them."""
        if args.bf16 is None:
            args.bf16 = (args.use_cpu or is_torch_bf16_gpu_available()) and not args.fp16
        if not torch.accelerator.is_available():
            args.dataloader_pin_memory = False  # there is no device to pin it for, and torch would warn
            # otherwise accelerate forms no group of the processes that torchrun starts, and each trains alone
            args.use_cpu |= int(os.environ.get("WORLD_SIZE") or 1) > 1

    def fit_loading_arguments(self, kwargs: dict[str, Any]) -> None:
        """Reject or leave out arguments of ``from_pretrained`` that do not suit the device."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Reject an optimizer that a user made before the model was placed, if the device cannot use it."""

    def default_mesh(self, processes: int, *, is_asked: bool) -> tuple[str, int, int]:
        """Return the mesh where the user names none, its devices and its slices.

        Args:
            processes: All processes, as accelerate counts them.
            is_asked: Whether the user names one.
        """
        # processes of DDP choose the shapes of their batches alone; where each is compiled, all have to take the same
        return "data=-1", processes if is_asked or self.plans_shapes else 1, 1

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        """Arrange all devices as a mesh of named axes, whose sizes multiply to `Topology.devices`.

        The first axis goes over the ``slices``. Here they are one device, or those of all processes.

        Raises:
            UserError: The devices are in another number of slices.
        """
        self._ranks, self.copies = prod(sizes.values()), sizes["tensor"]
        if self._ranks > 1 and dist.is_initialized() and self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo", timeout=PATIENCE)

    # ---- layouts

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        """Lay ``tensor`` out on the device over the mesh: dimension d over the axes ``axes[d]``, None meaning whole.

        A host tensor goes to its shards directly; a device tensor is laid out in place.
        """
        return tensor.to(device)

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        """Return the activation ``tensor`` laid out as by `place`, and its gradient too, by the compiler.

        Axes that do not divide their dimension are left out. Where processes have parts, it can only become whole.
        """
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def shard_map(
        self,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
        axes: Sequence[PartitionSpec],
        result_axes: PartitionSpec,
    ) -> torch.Tensor:
        """Call ``function(*tensors)`` on each device with its own parts of the tensors, for its part of the result.

        For functions of which the compiler would not see that the parts are independent.

        Args:
            function: Right for any part. It is given parts, and returns one.
            axes: The mesh axes that each dimension of each tensor goes over. An axis that does not divide every
                dimension that it is named for is left out.
            result_axes: The same of the result.
        """
        return function(*tensors)

    # ---- to and from the host

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a small host tensor to the device, as data.

        It has one dimension or more: XLA makes scalars 0 and 1 constants of the program.
        """
        return tensor.to(device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return small device tensors as host tensors, in one stop of the device."""
        return [tensor.detach().cpu() for tensor in tensors]

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Copy the parts of named tensors that this process's devices hold to the host, of tied tensors once.

        Returns:
            For each tensor its shards: ``shards[index]`` are those of its ``index`` in the first dimension, if that is
            over no axes, and ``shards.join()`` is the whole tensor, if this process has all of it. A tensor that has
            no shards is a host tensor itself.
        """
        copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in state.values()}
        return {name: copies[id(tensor)] for name, tensor in state.items()}

    def checkpoint_arguments(self, *, saves: bool) -> dict[str, Any]:
        """Return arguments of torch's `dcp.save`, which writes `local_shards`, or of `dcp.load` into device tensors.

        The processes of the group write and read together, from any thread; without a group one does by itself.
        """
        group = self._saving_group if self.topology().process_count > 1 else None
        return {"process_group": group, "no_dist": group is None}

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> DeviceLoader:
        """Move ``batches`` to the device; a batch's first dimension goes over ``batch_axes``.

        Every process gives batches of all rows, and copies those of its own devices; the others may hold anything.
        """
        return DeviceLoader(self, batches, batch_axes)

    def upload(self, tensor: torch.Tensor, batch_axes: tuple[str, ...], device: torch.device) -> torch.Tensor:
        """Copy a tensor of a batch to the devices: rows of tokens over the batch axes, other tensors whole to each."""
        return tensor.to(device)

    # ---- steps

    def step_boundary(self) -> None:
        """End the recorded step: what was computed since the last boundary becomes one execution.

        Plain torch executes as it goes.
        """

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, of tensors and modules, as one program for each shape where a device gains by that.

        Plain torch runs it as it is, and XLA makes it a part of the recorded step's.
        """
        return function

    def compile_count(self) -> int | None:
        """Return how many programs were compiled so far; None where nothing compiles."""
        return None

    def fuse(self, optimizer: Optimizer) -> None:
        """Let an optimizer be one kernel where the device gains by that."""

    def skip_update_unless(self, is_finite: torch.Tensor, optimizer: Optimizer) -> None:
        """Make the coming update of ``optimizer`` do nothing unless ``is_finite``, a number on the device."""
        if not is_finite:
            optimizer.zero_grad(set_to_none=True)

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let nothing be computed from any of ``tensors``, in place, before all of them are there.

        Operations of plain torch run in order.
        """

    def activations_on_host(self) -> AbstractContextManager[Any]:
        """Return a context in which a forward keeps what the backward needs in the memory of the host.

        Of layers that are computed again that is their inputs; on XLA it is of a loop's layers alone.
        """
        return save_on_cpu(pin_memory=torch.cuda.is_available())

    def recompute_layers(self, model: nn.Module, policy: Remat) -> None:
        """Make layers that transformers marked for activation checkpointing recompute in a way the device supports.

        With "dots" they keep what their matrix products return.
        """
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = self._recomputing(module, policy)

    def _recomputing(self, layer: Any, policy: Remat) -> Any:
        """Return what calls the forward of ``layer`` in the place of `torch.utils.checkpoint.checkpoint`."""
        if policy != Remat.DOTS:
            return layer._gradient_checkpointing_func  # torch's own, which transformers uses, works here as it is
        keep = functools.partial(create_selective_checkpoint_contexts, list(MATMULS))
        return functools.partial(layer._gradient_checkpointing_func, use_reentrant=False, context_fn=keep)

    def scan(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run layers that are alike as one compiled loop: see `layer_loop.scan_layers`."""
        raise NotImplementedError("Plain torch runs layers one by one: it compiles nothing that a loop would shorten.")

    def loop(
        self, step: LoopStep, carry: list[torch.Tensor], slices: list[torch.Tensor], *, reverse: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Call ``step`` for each index of the first dimension of ``slices``; no gradient is recorded.

        Args:
            step: Takes what is carried and one slice of each tensor; returns what is carried on, and its results.
            carry: What the first call is given.
            slices: Tensors with the same first dimension.
            reverse: Whether the last index comes first.

        Returns:
            What the last call carried on, and the results of all, stacked in the order of ``slices``.
        """
        results = list[list[torch.Tensor]]()
        for index in range(len(slices[0]))[:: -1 if reverse else 1]:
            carry, found = step(carry, [tensor[index] for tensor in slices])
            results.append(found)
        return carry, [torch.stack(each[:: -1 if reverse else 1]) for each in zip(*results, strict=True)]

    segment_attention = staticmethod(segment_attention)
    """Computes causal attention within segments by the device's best kernel."""
