"""Show what was sharded how, as a table."""

import re
from dataclasses import dataclass

from torch import nn

from .mesh import MeshShape
from .sharding_plan import Placement


@dataclass(frozen=True)
class ShardReport:
    """The placement of every parameter. Bytes are of the parameters alone, not of gradients or optimizer state."""

    mesh: MeshShape
    placements: dict[str, Placement]
    shapes: dict[str, tuple[int, ...]]
    sizes: dict[str, int]  # bytes of each parameter, whole

    @classmethod
    def of(cls, model: nn.Module, mesh: MeshShape, placements: dict[str, Placement]) -> "ShardReport":
        """Report on the parameters of a model, which may be split already."""
        parameters = dict(model.named_parameters())
        sizes = {name: each.numel() * each.element_size() for name, each in parameters.items()}
        return cls(mesh, placements, {name: tuple(each.shape) for name, each in parameters.items()}, sizes)

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the parameters that every device holds whole."""
        return sum(size for name, size in self.sizes.items() if not self.placements[name].is_sharded)

    @property
    def bytes_per_device(self) -> int:
        return sum(size // self.placements[name].parts(self.mesh) for name, size in self.sizes.items())

    def __str__(self) -> str:
        """Return the totals and, on several devices, a line for each kind of parameter: layers count together."""
        head = (
            f"mesh {self.mesh} on {self.mesh.devices} device(s): parameters take {_mib(self.bytes_per_device)} a "
            f"device of {_mib(self.total_bytes)} in all, {_mib(self.replicated_bytes)} of them replicated"
        )
        if self.mesh.devices == 1:
            return head
        return "\n".join([head, *_table(self._rows())])

    def _rows(self) -> list[tuple[str, ...]]:
        kinds: dict[tuple[str, ...], list[str]] = {}
        for name, placement in self.placements.items():
            shape = "x".join(map(str, self.shapes[name])) or "scalar"
            axes = ", ".join(_text(each) for each in placement.axes)
            over = f"[{axes}]" if placement.is_sharded else "replicated"
            key = (kind_of(name), shape, over, placement.reason)
            kinds.setdefault(key, []).append(name)
        rows: list[tuple[str, ...]] = []
        for (pattern, shape, over, reason), names in kinds.items():
            held = sum(self.sizes[name] // self.placements[name].parts(self.mesh) for name in names)
            count = f"{len(names)} x " if len(names) > 1 else ""
            rows.append((pattern, f"{count}{shape}", over, _mib(held), reason))
        return rows


def kind_of(name: str) -> str:
    """Return a parameter's name without the number of its layer: ``model.layers.*.mlp.up_proj.weight``."""
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    rows = [("parameter", "shape", "over", "a device", "why"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]


def _text(axes: str | tuple[str, ...] | None) -> str:
    return "-" if axes is None else axes if isinstance(axes, str) else "+".join(axes)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
