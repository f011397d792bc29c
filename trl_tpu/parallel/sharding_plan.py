"""Sharding plans: the mesh axes over which each dimension of a parameter is split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..errors import UserError
from .mesh import AXES, MeshShape, as_axes, names_of

if TYPE_CHECKING:
    from ..runtime import PartitionSpec

AUTO = "auto"


@dataclass(frozen=True)
class Rules:
    """User-defined sharding rules: shell patterns of parameter names, with the mesh axes of each dimension.

    ``"auto"`` in place of the axes leaves a parameter to the model's own plan. The first matching pattern applies.
    """

    source: str
    patterns: dict[str, PartitionSpec | str]

    @classmethod
    def read(cls, path: str | Path) -> Rules:
        """Read a YAML file."""
        return cls(f"sharding plan {str(path)!r}", yaml.safe_load(Path(path).read_bytes()))

    def find(self, name: str) -> str | None:
        """Return the first pattern that matches a parameter's name, or None."""
        return next((pattern for pattern in self.patterns if fnmatchcase(name, pattern)), None)

    def check(self, names: Iterable[str]) -> None:
        """Check that each pattern is used and each parameter of a model is matched.

        Args:
            names: Names of all parameters.

        Raises:
            UserError: A pattern is not used, or no pattern matches a parameter.
        """
        names = list(names)
        pattern_of = {name: self.find(name) for name in names}
        if unmatched := [name for name, pattern in pattern_of.items() if pattern is None]:
            raise UserError(
                f"{self.source}: no pattern matches {_some(unmatched)}. Add patterns, or add '\"*\": {AUTO}' as the "
                "last line to leave the rest to the model's own plan."
            )
        if unused := [pattern for pattern in self.patterns if pattern not in pattern_of.values()]:
            raise UserError(
                f"{self.source}: {_some(unused)} match(es) no parameter, or only parameters that an earlier pattern "
                f"matches. Move it up, or remove it. The parameters are, for example, {_some(names)}."
            )

    def fit(self, pattern: str, name: str, shape: tuple[int, ...], mesh: MeshShape) -> PartitionSpec | None:
        """Return the axes of ``pattern`` for the parameter ``name``, without axes of size 1.

        Returns:
            Axes of each dimension; None for a pattern with ``"auto"``.

        Raises:
            UserError: The shape has another number of dimensions, or a size that the axes do not divide, or an axis is
                unknown.
        """
        axes = self.patterns[pattern]
        if axes == AUTO:
            return None
        parts = [prod(mesh.sizes.get(axis, inf) for axis in names_of(names)) for names in axes]
        if len(axes) != len(shape) or any(size % count for size, count in zip(shape, parts, strict=True)):
            raise UserError(
                f"{self.source}: {pattern!r}: {_text(axes)} does not fit {name} of shape {list(shape)} on the mesh "
                f"'{mesh}', which would split it into {parts} parts. Write an axis ({', '.join(AXES)}), a list of "
                "axes or null for each dimension, of sizes that divide it."
            )
        return tuple(as_axes([axis for axis in names_of(names) if mesh.sizes[axis] > 1]) for names in axes)


def _text(axes: PartitionSpec | str) -> str:
    """Write the axes of a parameter as in a YAML file."""
    dimensions = (
        "null" if names is None else names if isinstance(names, str) else f"[{', '.join(names)}]" for names in axes
    )
    return f"[{', '.join(dimensions)}]"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# The part of a weight that each tensor-parallel style of transformers splits: output features, input features, rows or
# columns of an embedding table, or experts. Other styles describe communication, and the compiler derives that.
_SPLITS = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"), "out"),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"), "in"),
    "embedding_rowwise": "rows",
    "embedding_colwise": "columns",
    "grouped_gemm": "experts",
}

#: Rows of a bfloat16 tile, the smallest unit a TPU moves. libtpu reduce-scatters a gradient that is split into full
#: tiles. It often all-reduces a gradient that is split by columns, and slices the full result.
_TILE_ROWS = 16

# Styles with a split weight and gathered outputs.
GATHERED_OUTPUTS = ("colwise_gather_output", "colwise_rep")

_ADAPTER = re.compile(r"(?P<module>.+)\.(?P<part>lora_(?:embedding_)?[AB])\.[^.]+(?:\.weight)?")
# Adapter dimensions to split along with the base layer: B has the output features, A has the input features.
_ADAPTER_DIMS = {
    ("lora_B", "out"): 0,
    ("lora_A", "in"): 1,
    ("lora_embedding_A", "rows"): 1,
    ("lora_embedding_B", "columns"): 0,
}


@dataclass(frozen=True)
class Placement:
    """Sharding of a parameter: ``axes[d]`` has the mesh axis, or axes, of dimension d; ``reason`` explains it."""

    axes: PartitionSpec
    reason: str

    @property
    def names(self) -> tuple[str, ...]:
        """All mesh axes that split the parameter."""
        return tuple(name for axes in self.axes for name in names_of(axes))

    def __str__(self) -> str:
        return f"{_text(self.axes)}  # {self.reason}"

    def parts(self, mesh: MeshShape) -> int:
        """Return the number of different shards on the mesh. Further devices hold copies."""
        return prod(mesh.sizes[name] for name in self.names)


@dataclass(frozen=True)
class Plan:
    """Sharding plan of a model's parameters on a mesh.

    Args:
        mesh: The mesh.
        styles: Tensor-parallel plan of the model: styles by parameter pattern.
        expert_styles: Expert-parallel plan of the model. It takes precedence over `styles`, and also uses `tensor`.
        embeddings: Names of the embedding tables.
        rules: User-defined rules. They take precedence over the model's plans.
    """

    mesh: MeshShape
    styles: Mapping[str, str] = field(default_factory=dict)
    expert_styles: Mapping[str, str] = field(default_factory=dict)
    embeddings: Collection[str] = ()
    rules: Rules | None = None

    def place(self, name: str, shape: tuple[int, ...]) -> Placement:
        """Return the placement of a parameter.

        Args:
            name: The parameter's name, with or without peft's prefixes.
            shape: The parameter's shape.

        Raises:
            UserError: A user-defined rule does not fit the shape.
        """
        bare = bare_name(name)
        if self.rules is not None and (pattern := self.rules.find(bare)):
            axes = self.rules.fit(pattern, bare, shape, self.mesh)
            if axes is not None:
                return Placement(axes, f"rule {pattern!r}")
        if bare in self.embeddings and (embedding := self._embedding(shape)):
            return embedding
        axes_of: list[str | None] = [None] * len(shape)
        reasons = []
        for axis, find in (("tensor", self._tensor_dim), ("fsdp", self._fsdp_dim)):
            if self.mesh.sizes[axis] > 1:
                dim, reason = find(bare, shape, axes_of)
                reasons.append(reason)
                if dim is not None:
                    axes_of[dim] = axis
        return Placement(tuple(axes_of), "; ".join(reasons) or "fsdp=1")

    def style_of(self, name: str) -> str | None:
        """Return the style of a module or parameter in the model's own plans, by `bare_name`."""
        return self._find(self.expert_styles, name) or self._find(self.styles, name)

    def _find(self, styles: Mapping[str, str], name: str) -> str | None:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        return styles.get(pattern) or styles.get(pattern.rpartition(".")[0])

    def _embedding(self, shape: tuple[int, ...]) -> Placement | None:
        """Split the features of an embedding table over all weight axes; return None if they do not divide.

        With split rows (tokens), each device would look up all tokens of the batch and all-reduce full activations.
        """
        axes = tuple(axis for axis in ("tensor", "fsdp") if self.mesh.sizes[axis] > 1)
        if not axes or len(shape) != 2 or shape[1] % prod(self.mesh.sizes[axis] for axis in axes):
            return None
        return Placement((None, as_axes(axes)), "an embedding's features")

    def _tensor_dim(self, name: str, shape: tuple[int, ...], _taken: list[str | None]) -> tuple[int | None, str]:
        """Return the dimension to split over `tensor`, or None, and the reason."""
        reason = "not in the model's tensor-parallel plan"
        adapter = _ADAPTER.fullmatch(name)
        for styles in (self.expert_styles, self.styles):
            style = self._find(styles, f"{adapter['module']}.weight" if adapter else name)
            if style is None:
                continue
            split = _SPLITS.get(style)
            dim = _ADAPTER_DIMS.get((adapter["part"], split or "")) if adapter else _split_dim(name, split, len(shape))
            if dim is None:
                reason = f"{style} leaves it whole"
            elif shape[dim] % self.mesh.tensor:
                reason = f"{style}, but {shape[dim]} / tensor={self.mesh.tensor} is not a whole number"
            else:
                return dim, style
        return None, reason

    def _fsdp_dim(self, name: str, shape: tuple[int, ...], taken: list[str | None]) -> tuple[int | None, str]:
        """Return the dimension to split over `fsdp`, or None, and the reason."""
        free = [
            dim for dim, size in enumerate(shape) if taken[dim] is None and size > 0 and size % self.mesh.fsdp == 0
        ]
        if not free:
            which = "other dimension" if any(taken) else "dimension"
            return None, f"no {which} of {list(shape)} is divisible by fsdp={self.mesh.fsdp}"
        for dim in free:
            if dim < len(shape) - 1 and shape[dim] // self.mesh.fsdp % _TILE_ROWS == 0:
                return dim, "rows in whole tiles"
        return max(free, key=lambda dim: (shape[dim], -dim)), "largest divisible dimension"


def _split_dim(name: str, split: str | None, rank: int) -> int | None:
    """Return the dimension of a parameter for a part in `_SPLITS`; None if the parameter is not split."""
    if split is None or (split == "columns" and rank < 2):
        return None
    is_bias = rank == 1 or name.endswith("bias")
    if split == "in":
        return None if is_bias else rank - 1
    if split == "out":
        return rank - 1 if is_bias else rank - 2
    return {"rows": 0, "experts": 0, "columns": 1}[split]


def bare_name(name: str) -> str:
    """Return the name of a parameter or module without peft's additions, as sharding plans use it."""
    name = name.removeprefix("base_model.model.")
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)", "", name)
