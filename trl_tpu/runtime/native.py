"""Plain torch: a CPU or a CUDA device, with accelerate's own loaders around it."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from . import PartitionSpec, Remat, Value
from .kernels.plain import MATMULS, attend_in_rows
from .storage import read_state, write_state


class NativeRuntime:
    """The `Runtime` for plain torch. One process drives one device; accelerate's launchers add more processes."""

    name = "native"
    compiles = False
    shares_mesh = False

    def start(self) -> None:
        """Plain torch needs no preparation."""

    def device_count(self) -> int:
        return 1

    def process_index(self) -> int:
        return 0  # several processes of plain torch share no mesh: accelerate leads them

    def process_count(self) -> int:
        return 1

    def local_positions(self) -> tuple[int, ...]:
        return (0,)

    def barrier(self) -> None:
        """One process."""

    def all_gather_object(self, value: Value, while_saving: bool = False) -> list[Value]:
        return [value]

    def hardware(self) -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"

    def seed(self, seed: int) -> None:
        """transformers' ``set_seed`` has seeded every generator of plain torch."""

    def slice_count(self) -> int:
        return 1

    def set_mesh(self, sizes: Mapping[str, int], slices: int) -> None:
        """One device: every axis has size 1, which the mesh arithmetic has checked."""

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        return tensor.to(device)

    def constrain(self, tensor: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        return tensor

    def scatter(self, gradient: torch.Tensor, axes: PartitionSpec) -> torch.Tensor:
        return gradient

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are: operations run in order."""

    def autocast(self, dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)

    def attention(self, *args: Any) -> torch.Tensor:
        return attend_in_rows(*args)

    def has_attention_kernel(self) -> bool:
        return False

    def shard_map(
        self,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
        axes: Sequence[PartitionSpec],
        result_axes: PartitionSpec,
    ) -> torch.Tensor:
        return function(*tensors)

    def recompute_layers(self, model: nn.Module, policy: Remat) -> None:
        if policy != "dots":
            return  # torch.utils.checkpoint, which transformers uses, works here as it is
        keep = functools.partial(create_selective_checkpoint_contexts, list(MATMULS))
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                checkpoint: Any = module._gradient_checkpointing_func
                module._gradient_checkpointing_func = functools.partial(  # type: ignore[assignment]
                    checkpoint, use_reentrant=False, context_fn=keep
                )

    def divide(self, block: nn.Module, last: str, axes: Mapping[str, PartitionSpec]) -> None:
        pass  # its weights are whole here

    def scan(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("Plain torch runs layers one by one: it compiles nothing that a loop would shorten.")

    def loader(self, batches: DataLoader, batch_axes: tuple[str, ...]) -> Iterable[dict[str, Any]]:
        return batches

    def step_boundary(self) -> None:
        """Plain torch executes as it goes."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device)

    def replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().cpu() for tensor in tensors]

    def to_host(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in state.items()}

    def local_shards(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in state.values()}
        return {name: copies[id(tensor)] for name, tensor in state.items()}

    def join_shards(self, snapshot: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return dict(snapshot)

    def index_shards(self, part: Any, index: int) -> Any:
        return part[index]

    def write(self, snapshot: Mapping[str, Any], folder: Path) -> None:
        write_state(snapshot, folder)

    def read(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        read_state(state, folder)

    def compile_count(self) -> int:
        return 0
