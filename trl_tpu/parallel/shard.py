"""Apply a plan to a model and report what was done."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..runtime import Runtime
from .mesh import MeshShape
from .plan import Placement, plan_parameters


@dataclass(frozen=True)
class ShardReport:
    """What was sharded how. Bytes are of the parameters alone, not of gradients or optimizer state."""

    mesh: MeshShape
    placements: dict[str, Placement]
    sizes: dict[str, int]  # bytes of each parameter, whole

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def replicated_bytes(self) -> int:
        return sum(size for name, size in self.sizes.items() if not self.placements[name].is_sharded)

    @property
    def bytes_per_device(self) -> int:
        return (self.total_bytes - self.replicated_bytes) // self.mesh.fsdp + self.replicated_bytes

    def __str__(self) -> str:
        whole = [name for name, placement in self.placements.items() if not placement.is_sharded]
        lines = [
            f"mesh {self.mesh} on {self.mesh.devices} device(s): parameters take {_mib(self.bytes_per_device)} a "
            f"device of {_mib(self.total_bytes)} in all"
        ]
        if self.mesh.fsdp > 1:
            lines.append(
                f"  sharded over fsdp: {len(self.placements) - len(whole)} of {len(self.placements)} parameters"
            )
            for name in whole:
                lines.append(f"  replicated: {name} ({_mib(self.sizes[name])}; {self.placements[name].reason})")
        return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def shard_model(model: nn.Module, mesh: MeshShape, runtime: Runtime) -> ShardReport:
    """Lay the parameters of ``model`` out over the mesh, in place; tied parameters count once.

    The model must be on the runtime's device, with its weights tied: a move unties them on XLA.
    """
    parameters = dict(model.named_parameters())  # named_parameters lists a tied parameter once
    placements = plan_parameters({name: tuple(parameter.shape) for name, parameter in parameters.items()}, mesh)
    for name, parameter in parameters.items():
        runtime.shard(parameter, placements[name].axes)
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
    return ShardReport(mesh, placements, sizes)


def keep_batch_split(model: nn.Module, mesh: MeshShape, runtime: Runtime) -> None:
    """Keep hidden states [R, L, H] split over the batch axes at every layer's end, by forward hooks.

    Left alone, GSPMD follows the weights' sharding into the activations and gathers whole batches on every device.
    """
    if mesh.batch_shards == 1:
        return

    def constrain(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, torch.Tensor) or hidden.shape[0] % mesh.batch_shards:
            return output
        hidden = runtime.constrain(hidden, (mesh.batch_axes, *([None] * (hidden.dim() - 1))))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer | nn.Embedding):
            module.register_forward_hook(constrain)
