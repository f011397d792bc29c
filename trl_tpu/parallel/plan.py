"""Which dimension of each parameter goes over which mesh axis, as data: shapes in, placements out."""

from collections.abc import Mapping
from dataclasses import dataclass

from .mesh import MeshShape


@dataclass(frozen=True)
class Placement:
    """Where a parameter's dimensions go: ``axes[d]`` is the mesh axis of dimension d, or None; ``reason`` says why."""

    axes: tuple[str | None, ...]
    reason: str

    @property
    def is_sharded(self) -> bool:
        return any(self.axes)


def plan_parameters(shapes: Mapping[str, tuple[int, ...]], mesh: MeshShape) -> dict[str, Placement]:
    """Split every parameter over ``fsdp`` along its largest divisible dimension (ZeRO-3, https://arxiv.org/abs/1910.02054).

    A parameter without a dimension that ``fsdp`` divides stays whole on every device, and the reason says so.
    """
    return {name: _place(shape, mesh.fsdp) for name, shape in shapes.items()}


def _place(shape: tuple[int, ...], fsdp: int) -> Placement:
    whole = (None,) * len(shape)
    if fsdp == 1:
        return Placement(whole, "fsdp=1")
    divisible = [dim for dim, size in enumerate(shape) if size % fsdp == 0 and size > 0]
    if not divisible:
        return Placement(whole, f"no dimension of {list(shape)} is divisible by fsdp={fsdp}")
    largest = max(divisible, key=lambda dim: (shape[dim], -dim))
    axes = tuple("fsdp" if dim == largest else None for dim in range(len(shape)))
    return Placement(axes, "largest divisible dimension")
