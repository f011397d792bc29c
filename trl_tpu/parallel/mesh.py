"""Shapes of device meshes, sharding plans of a model's parameters, and published figures of TPU chips and slices.

A sharding plan gives the mesh axes over which each dimension of a parameter is split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..errors import UserError

if TYPE_CHECKING:
    from ..runtime import PartitionSpec

#: All mesh axes, slowest first. Batches are split over `data` and `fsdp`, weights over `fsdp` and `tensor`.
AXES = ("data", "fsdp", "tensor")

#: Axes over which a batch is split.
BATCH_AXES = ("data", "fsdp")

_AXIS_SIZE = re.compile(rf"(?!slices=-)({'|'.join(AXES)}|slices)=(-1|[1-9][0-9]*)")


def names_of(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the mesh axes of one tensor dimension as a tuple, from None, one name or several."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def as_axes(names: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return mesh axes of one tensor dimension in the form of a `PartitionSpec`; the inverse of `names_of`."""
    return None if not names else names[0] if len(names) == 1 else tuple(names)


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes, in the order of `AXES`. Their product is the number of devices.

    `slices` is the number of TPU slices. A slower network connects slices, so they form the outer part of `data`.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    slices: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        return prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Number of parts of a batch: the product of the batch axes' sizes."""
        return prod(self.sizes[axis] for axis in BATCH_AXES)

    def __str__(self) -> str:
        sizes = {name: size for name, size in vars(self).items() if size > 1 or name in BATCH_AXES}
        return ",".join(f"{name}={size}" for name, size in sizes.items())


def parse_mesh(spec: str, devices: int, slices: int = 1) -> MeshShape:
    """Read a mesh such as ``"fsdp=-1"`` or ``"data=2,fsdp=4,tensor=2"``; -1 stands for the remaining devices.

    Args:
        spec: Axis sizes, separated by commas. Missing axes have size 1, except `data`: its default is the number of
            slices. ``slices=2`` sets the number of slices.
        devices: The number of devices to arrange.
        slices: The number of slices if the spec does not set it.

    Raises:
        UserError: An axis is unknown or repeated, a size is not a positive integer or -1, or the sizes do not multiply
            to ``devices``: the message shows the equation.
    """
    sizes: dict[str, int] = {}
    for part in spec.replace(" ", "").split(","):
        match = _AXIS_SIZE.fullmatch(part)
        if match is None or match[1] in sizes:
            raise UserError(
                f"mesh {spec!r}: {part!r} is not AXIS=SIZE, once for each axis: the axes are {', '.join(AXES)}, and a "
                "size is a positive integer, or -1 for the remaining devices. `slices` is the number of TPU slices."
            )
        sizes[match[1]] = int(match[2])
    slices = sizes.pop("slices", slices)
    sizes = {"data": slices, "fsdp": 1, "tensor": 1} | sizes
    equation = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    fixed = prod(size for size in sizes.values() if size != -1)
    filled = {axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}
    shape = MeshShape(**filled, slices=slices)
    if shape.devices != devices:
        raise UserError(
            f"mesh {spec!r}: the axis sizes must multiply to the number of devices, {devices}, but are {equation}. "
            "Write -1 for one axis that may be of any size."
        )
    return shape


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
        pattern_of = {name: self.find(name) for name in names}
        if unmatched := [name for name, pattern in pattern_of.items() if pattern is None]:
            raise UserError(
                f"{self.source}: no pattern matches {_some(unmatched)}. Add patterns, or add '\"*\": {AUTO}' as the "
                "last line to leave the rest to the model's own plan."
            )
        if unused := [pattern for pattern in self.patterns if pattern not in pattern_of.values()]:
            raise UserError(
                f"{self.source}: {_some(unused)} match(es) no parameter, or only parameters that an earlier pattern "
                f"matches. Move it up, or remove it. The parameters are, for example, {_some([*pattern_of])}."
            )

    def place(self, name: str, shape: tuple[int, ...], mesh: MeshShape) -> Placement | None:
        """Return the placement of a parameter, without axes of size 1.

        Returns:
            The placement; None without a matching pattern, or for a pattern with ``"auto"``.

        Raises:
            UserError: The shape has another number of dimensions, or a size that the axes do not divide, or an axis is
                unknown.
        """
        pattern = self.find(name)
        if pattern is None or (axes := self.patterns[pattern]) == AUTO:
            return None
        parts = [prod(mesh.sizes.get(axis, inf) for axis in names_of(names)) for names in axes]
        if len(axes) != len(shape) or any(size % count for size, count in zip(shape, parts, strict=True)):
            raise UserError(
                f"{self.source}: {pattern!r}: {_text(axes)} does not fit {name} of shape {list(shape)} on the mesh "
                f"'{mesh}', which would split it into {parts} parts. Write an axis ({', '.join(AXES)}), a list of "
                "axes or null for each dimension, of sizes that divide it."
            )
        fitted = tuple(as_axes([axis for axis in names_of(names) if mesh.sizes[axis] > 1]) for names in axes)
        return Placement(fitted, f"rule {pattern!r}")


def _text(axes: PartitionSpec | str) -> str:
    """Write the axes of a parameter as in a YAML file."""
    return json.dumps(axes).replace('"', "")


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

    def __str__(self) -> str:
        return f"{_text(self.axes)}  # {self.reason}"

    def parts(self, mesh: MeshShape) -> int:
        """Return the number of different shards on the mesh. Further devices hold copies."""
        return prod(mesh.sizes[name] for axes in self.axes for name in names_of(axes))


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
        if self.rules is not None and (placement := self.rules.place(bare, shape, self.mesh)):
            return placement
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

    def gathers_outputs(self, name: str) -> bool:
        """Return whether a weight of this `bare_name` is split, but the outputs of its module are gathered."""
        style = self._find(self.expert_styles, name) or self._find(self.styles, name)
        return style in ("colwise_gather_output", "colwise_rep")

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
        fsdp = self.mesh.fsdp
        free = [dim for dim, size in enumerate(shape) if taken[dim] is None and size > 0 and size % fsdp == 0]
        if not free:
            which = "other dimension" if any(taken) else "dimension"
            return None, f"no {which} of {list(shape)} is divisible by fsdp={fsdp}"
        for dim in free:
            if dim < len(shape) - 1 and shape[dim] // fsdp % _TILE_ROWS == 0:
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


MiB, GiB = 2**20, 2**30


@dataclass(frozen=True)
class Chip:
    """Published figures of a TPU chip.

    Args:
        name: Name of the chip in a topology, such as "v6e".
        peak_flops: Peak rate of bfloat16 matrix products, in FLOP/s.
        memory: HBM that is available to programs, in bytes. libtpu 0.0.21 reserves a quarter of a GiB, as its
            out-of-memory message shows.
        link_bandwidth: Total bandwidth of all links to other chips in one direction, in bytes per second: half of the
            published bidirectional bandwidth.
        memory_bandwidth: HBM bandwidth, in bytes per second.
        shapes: Shapes of slices that can be rented, from small to large.
    """

    name: str
    peak_flops: float
    memory: int
    link_bandwidth: float
    memory_bandwidth: float
    shapes: tuple[str, ...]

    @property
    def source(self) -> str:
        """URL of the page with the figures."""
        return f"https://cloud.google.com/tpu/docs/{self.name}"


_2D_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D_SHAPES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)
#: Known chips, by name.
CHIPS = {
    "v5e": Chip("v5e", 197e12, 16 * GiB - 258 * MiB, 400e9 / 2, 819e9, _2D_SHAPES),
    "v5p": Chip("v5p", 459e12, 96 * GiB - 263 * MiB, 1200e9 / 2, 2765e9, _3D_SHAPES),
    "v6e": Chip("v6e", 918e12, 63 * GiB // 2 - 260 * MiB, 800e9 / 2, 1640e9, _2D_SHAPES),
}


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice: the kind of its chips, and their arrangement, such as "4x4"."""

    chip: Chip
    shape: str

    @property
    def chips(self) -> int:
        return prod(map(int, self.shape.split("x")))

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.shape}"

    @property
    def compiled_as(self) -> str:
        """Topology to pass to libtpu. libtpu has no topology of one chip: use one chip of the smallest slice."""
        return f"{self.chip.name}:2x2" if self.chips == 1 else str(self)


def parse_topology(text: str) -> TpuSlice:
    """Read a topology such as ``"v6e:4x4"``.

    Raises:
        UserError: The kind of chip is unknown, or its slices do not have this shape. The message lists valid values.
    """
    kind, _, shape = text.strip().partition(":")
    chip = CHIPS.get(kind.lower())
    if chip is None or shape not in chip.shapes:
        shapes = "; ".join(f"{name}: {', '.join(known.shapes)}" for name, known in CHIPS.items())
        raise UserError(f"topology {text!r} is not CHIP:SHAPE, such as v6e:4x4. Shapes by chip are {shapes}.")
    return TpuSlice(chip, shape)
