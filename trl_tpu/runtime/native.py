"""Plain torch: a CPU or a CUDA device, with accelerate's own loaders around it."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from . import PartitionSpec, Planners, Remat, Topology, Value
from .kernels.plain import MATMULS, attend_in_rows


class NativeRuntime:
    """The `Runtime` for plain torch. One process drives one device; accelerate's launchers add more processes."""

    name = "native"
    compiles = False
    shares_mesh = False

    @property
    def has_attention_kernel(self) -> bool:
        return False

    def topology(self) -> Topology:
        """Return one device and one process: several processes share no mesh, accelerate leads them."""
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
        return Topology(1, slices=1, process_index=0, process_count=1, local_positions=(0,), description=name)

    def all_gather_object(self, value: Value, while_saving: bool = False) -> list[Value]:
        return [value]

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        """Do nothing: every axis has size 1, which the mesh arithmetic has checked."""

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        return tensor.to(device)

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        return tensor

    def scatter(self, gradient: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        return gradient

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: operations run in order."""

    def attention(self, *args: Any) -> torch.Tensor:
        return attend_in_rows(*args)

    def shard_map(
        self,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
        axes: Sequence[PartitionSpec],
        result_axes: PartitionSpec,
    ) -> torch.Tensor:
        return function(*tensors)

    def recompute_layers(self, model: nn.Module, policy: Remat) -> None:
        if policy != Remat.DOTS:
            return  # torch.utils.checkpoint, which transformers uses, works here as it is
        keep = functools.partial(create_selective_checkpoint_contexts, list(MATMULS))
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                checkpoint: Any = module._gradient_checkpointing_func
                module._gradient_checkpointing_func = functools.partial(  # type: ignore[assignment]
                    checkpoint, use_reentrant=False, context_fn=keep
                )

    def scan(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("Plain torch runs layers one by one: it compiles nothing that a loop would shorten.")

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> Iterable[dict[str, Any]]:
        return batches

    def step_boundary(self) -> None:
        """Do nothing: plain torch executes as it goes."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().cpu() for tensor in tensors]

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in state.values()}
        return {name: copies[id(tensor)] for name, tensor in state.items()}

    def checkpoint_planners(self) -> Planners:
        return Planners()

    def compile_count(self) -> int:
        return 0
