"""The sharding plan: which dimension of each parameter goes over which axis of the mesh."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import UserError, UserFileError
from .mesh import AXES, MeshShape, as_axes, names_of

if TYPE_CHECKING:
    from ..runtime import PartitionSpec

AUTO = "auto"


@dataclass(frozen=True)
class Rules:
    """Patterns over parameter names, as in a shell, to the mesh axes of each dimension, or ``"auto"``: as derived.

    The first pattern that matches a name decides.
    """

    source: str
    patterns: dict[str, PartitionSpec | str]

    @classmethod
    def read(cls, path: str | Path) -> Rules:
        """Read a YAML file.

        Raises:
            UserError: It is no YAML, no mapping of patterns to lists of axes, or names an axis that does not exist
                or twice.
            UserFileError: There is no such file.
        """
        source = f"sharding plan {str(path)!r}"
        if not Path(path).is_file():
            raise UserFileError(f"There is no {source}: name a YAML file that maps patterns to mesh axes.")
        try:
            content = yaml.safe_load(Path(path).read_bytes())
        except yaml.YAMLError as error:
            raise UserError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from error
        if not isinstance(content, dict) or not content:
            raise UserError(f"{source} must map patterns of parameter names to lists of mesh axes, or to {AUTO!r}.")
        return cls(source, {str(pattern): _axes(source, pattern, value) for pattern, value in content.items()})

    def find(self, name: str) -> str | None:
        """Return the pattern that decides for a parameter; None where no pattern matches."""
        return next((pattern for pattern in self.patterns if fnmatchcase(name, pattern)), None)

    def check(self, names: Iterable[str]) -> None:
        """Compare the patterns with all parameters of a model.

        Raises:
            UserError: A pattern decides nothing, or nothing matches a name.
        """
        names = list(names)
        found = {name: self.find(name) for name in names}
        if unmatched := [name for name, pattern in found.items() if pattern is None]:
            raise UserError(
                f"{self.source}: no pattern matches {_some(unmatched)}. Add patterns, or as the last line "
                f"'\"*\": {AUTO}', which leaves the rest to the model's own plan."
            )
        if idle := [pattern for pattern in self.patterns if pattern not in found.values()]:
            raise UserError(
                f"{self.source}: {_some(idle)} match(es) no parameter, or only what earlier patterns match: the first "
                f"decides. Move it up, or take it out. The parameters are, for example, {_some(names)}."
            )

    def fit(self, pattern: str, name: str, shape: tuple[int, ...], mesh: MeshShape) -> PartitionSpec | None:
        """Return the axes of ``pattern`` for the parameter ``name``, without those of size 1 in the mesh.

        Returns:
            None for a pattern that says ``"auto"``.

        Raises:
            UserError: The shape has another number of dimensions, or a size that the axes do not divide.
        """
        axes = self.patterns[pattern]
        if isinstance(axes, str):
            return None
        where = f"{self.source}: {pattern!r}: {_text(axes)}"
        if len(axes) != len(shape):
            raise UserError(
                f"{where} has {len(axes)} dimension(s), but {name} has the shape {list(shape)}: write an axis, a list "
                "of axes or null for each dimension."
            )
        for size, over in zip(shape, axes, strict=True):
            parts = prod(mesh.sizes[axis] for axis in names_of(over))
            if size % parts:
                raise UserError(
                    f"{where} does not fit {name} of shape {list(shape)} on the mesh '{mesh}': {size} / {parts} is no "
                    "whole number."
                )
        return tuple(as_axes([axis for axis in names_of(over) if mesh.sizes[axis] > 1]) for over in axes)


def _axes(source: str, pattern: Any, value: Any) -> PartitionSpec | str:
    if value == AUTO:
        return AUTO
    dimensions = [each for each in value if each is not None] if isinstance(value, list) else [None]
    names = [name for each in dimensions for name in (each if isinstance(each, list) else [each])]
    if any(name not in AXES or names.count(name) > 1 for name in names):
        raise UserError(
            f"{source}: {pattern!r}: {value!r} is not {AUTO!r}, nor a list of a mesh axis, a list of axes or null for "
            f"each dimension: the axes are {', '.join(AXES)}, each once."
        )
    return tuple(tuple(each) if isinstance(each, list) else each for each in value)


def _text(axes: PartitionSpec) -> str:
    """Write axes as in a YAML file."""
    each = (
        "null" if names is None else names if isinstance(names, str) else f"[{', '.join(names)}]" for names in axes
    )
    return f"[{', '.join(each)}]"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# What a style of transformers splits of a weight: the features it puts out, those it takes in, rows or columns of an
# embedding table, or whole experts. The others say how modules communicate, which the compiler finds out by itself.
_SPLITS = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"), "out"),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"), "in"),
    "embedding_rowwise": "rows",
    "embedding_colwise": "columns",
    "grouped_gemm": "experts",
}

_TILE_ROWS = 16
"""Rows of a bfloat16 tile, the least that a TPU moves. libtpu adds up and scatters a gradient that is split by whole
tiles at once; one that is split by columns it often adds up whole on every chip, and then cuts."""

# Styles whose outputs every device needs whole, though the weight is split.
GATHERED_OUTPUTS = ("colwise_gather_output", "colwise_rep")

_ADAPTER = re.compile(r"(?P<module>.+)\.(?P<part>lora_(?:embedding_)?[AB])\.[^.]+(?:\.weight)?")
# Which dimension of an adapter belongs to what is split of its base layer: B puts features out, A takes them in.
_ADAPTER_DIMS = {
    ("lora_B", "out"): 0,
    ("lora_A", "in"): 1,
    ("lora_embedding_A", "rows"): 1,
    ("lora_embedding_B", "columns"): 0,
}


@dataclass(frozen=True)
class Placement:
    """Where a parameter goes: ``axes[d]`` is the mesh axis, or axes, of dimension d; ``reason`` says why."""

    axes: PartitionSpec
    reason: str

    @property
    def names(self) -> tuple[str, ...]:
        """Every mesh axis that splits the parameter."""
        return tuple(name for axes in self.axes for name in names_of(axes))

    @property
    def is_sharded(self) -> bool:
        return bool(self.names)

    def __str__(self) -> str:
        return f"{_text(self.axes)}  # {self.reason}"

    def parts(self, mesh: MeshShape) -> int:
        """Return how many parts the mesh cuts the parameter into; the other devices hold copies."""
        return prod(mesh.sizes[name] for name in self.names)


@dataclass(frozen=True)
class Plan:
    """How the parameters of one model go over ``mesh``.

    Args:
        mesh: The mesh.
        styles: The model's tensor-parallel plan.
        expert_styles: Its expert-parallel plan, which goes before; also over `tensor`.
        embeddings: The names of embedding tables.
        rules: A plan of the user's own.
    """

    mesh: MeshShape
    styles: Mapping[str, str] = field(default_factory=dict)
    expert_styles: Mapping[str, str] = field(default_factory=dict)
    embeddings: Collection[str] = ()
    rules: Rules | None = None

    def place(self, name: str, shape: tuple[int, ...]) -> Placement:
        """Return the placement of a parameter.

        Raises:
            UserError: A rule does not fit its shape.
        """
        bare = bare_name(name)
        if self.rules is not None and (pattern := self.rules.find(bare)):
            axes = self.rules.fit(pattern, bare, shape, self.mesh)
            if axes is not None:
                return Placement(axes, f"rule {pattern!r}")
        if bare in self.embeddings and (embedding := self._embedding(shape)):
            return embedding
        over: list[str | None] = [None] * len(shape)
        reasons = []
        for axis, find in (("tensor", self._tensor_dim), ("fsdp", self._fsdp_dim)):
            if self.mesh.sizes[axis] > 1:
                dim, reason = find(bare, shape, over)
                reasons.append(reason)
                if dim is not None:
                    over[dim] = axis
        return Placement(tuple(over), "; ".join(reasons) or "fsdp=1")

    def style_of(self, name: str) -> str | None:
        """Return the style of a module or parameter (by its bare name) in the model's own plans."""
        return self._find(self.expert_styles, name) or self._find(self.styles, name)

    def _find(self, styles: Mapping[str, str], name: str) -> str | None:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        return styles.get(pattern) or styles.get(pattern.rpartition(".")[0])

    def _embedding(self, shape: tuple[int, ...]) -> Placement | None:
        """Place an embedding table by features, over every axis that splits weights; None where they do not divide.

        By rows (tokens), each device would look up every token of the batch and add up whole activations.
        """
        axes = tuple(axis for axis in ("tensor", "fsdp") if self.mesh.sizes[axis] > 1)
        if not axes or len(shape) != 2 or shape[1] % prod(self.mesh.sizes[axis] for axis in axes):
            return None
        return Placement((None, as_axes(axes)), "an embedding's features")

    def _tensor_dim(self, name: str, shape: tuple[int, ...], _taken: list[str | None]) -> tuple[int | None, str]:
        """Return the dimension that goes over `tensor`, and why, or why none."""
        reason = "not in the model's tensor-parallel plan"
        adapter = _ADAPTER.fullmatch(name)
        for styles in (self.expert_styles, self.styles):
            style = self._find(styles, f"{adapter['module']}.weight" if adapter else name)
            if style is None:
                continue
            split = _SPLITS.get(style)
            dim = _ADAPTER_DIMS.get((adapter["part"], split or "")) if adapter else _dim(name, split, len(shape))
            if dim is None:
                reason = f"{style} leaves it whole"
            elif shape[dim] % self.mesh.tensor:
                reason = f"{style}, but {shape[dim]} / tensor={self.mesh.tensor} is no whole number"
            else:
                return dim, style
        return None, reason

    def _fsdp_dim(self, name: str, shape: tuple[int, ...], taken: list[str | None]) -> tuple[int | None, str]:
        """Return the dimension that goes over `fsdp`, and why, or why none."""
        free = [
            dim for dim, size in enumerate(shape) if taken[dim] is None and size > 0 and size % self.mesh.fsdp == 0
        ]
        if not free:
            left = "left of" if any(taken) else "of"
            return None, f"no dimension {left} {list(shape)} is divisible by fsdp={self.mesh.fsdp}"
        for dim in free:
            if dim < len(shape) - 1 and shape[dim] // self.mesh.fsdp % _TILE_ROWS == 0:
                return dim, "rows in whole tiles"
        return max(free, key=lambda dim: (shape[dim], -dim)), "largest divisible dimension"


def _dim(name: str, split: str | None, rank: int) -> int | None:
    if split is None or (split == "columns" and rank < 2):
        return None
    is_bias = rank == 1 or name.endswith("bias")
    if split == "in":
        return None if is_bias else rank - 1
    if split == "out":
        return rank - 1 if is_bias else rank - 2
    return {"rows": 0, "experts": 0, "columns": 1}[split]


def bare_name(name: str) -> str:
    """Return the name of a parameter or module without what PEFT puts around it: plans hold with and without."""
    name = name.removeprefix("base_model.model.")
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)", "", name)
