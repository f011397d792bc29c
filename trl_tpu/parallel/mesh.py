"""Device meshes, and the chips of TPU slices."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..errors import UserError

#: Every axis, slowest first. A batch goes over `data` and `fsdp` together; weights are split over `fsdp` and `tensor`.
AXES = ("data", "fsdp", "tensor")

#: The axes that a batch is split over.
BATCH_AXES = ("data", "fsdp")

_SIZE = re.compile(rf"(?!slices=-)({'|'.join(AXES)}|slices)=(-1|[1-9][0-9]*)")


def names_of(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of one dimension."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def as_axes(names: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return the mesh axes of one dimension in the form that `names_of` reads."""
    return None if not names else names[0] if len(names) == 1 else tuple(names)


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh axes, in the order of `AXES`; their product is the number of devices.

    `slices` is how many TPU slices the devices are in, which a slower network joins: the outer part of `data`.
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
        """How many parts a batch is split into: one for each device of the batch axes."""
        return prod(self.sizes[axis] for axis in BATCH_AXES)

    def __str__(self) -> str:
        shown = {name: size for name, size in vars(self).items() if size > 1 or name in BATCH_AXES}
        return ",".join(f"{name}={size}" for name, size in shown.items())


def parse_mesh(spec: str, devices: int, slices: int = 1) -> MeshShape:
    """Read a mesh written as ``"fsdp=-1"`` or ``"data=2,fsdp=4,tensor=2"``; one axis may be -1: what is left.

    Args:
        spec: Axis sizes, separated by commas. An axis that is not named has size 1, but `data` is as large as
            `slices`. ``slices=2`` says how many slices `data` goes over.
        devices: The number of devices to arrange.
        slices: How many slices they are in, where the spec does not say.

    Raises:
        UserError: For an unknown or repeated axis, a size that is not a positive integer or -1, or sizes that do
            not multiply to ``devices``; the message shows the equation.
    """
    sizes: dict[str, int] = {}
    for part in spec.replace(" ", "").split(","):
        found = _SIZE.fullmatch(part)
        if found is None or found[1] in sizes:
            raise UserError(
                f"mesh {spec!r}: {part!r} is not AXIS=SIZE, once for each axis: the axes are {', '.join(AXES)}, and a "
                "size is a positive integer, or -1 for what is left. `slices` is how many slices `data` goes over."
            )
        sizes[found[1]] = int(found[2])
    slices = sizes.pop("slices", slices)
    sizes = {"data": slices, "fsdp": 1, "tensor": 1} | sizes
    equation = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    fixed = prod(size for size in sizes.values() if size != -1)
    shape = MeshShape(
        **{axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}, slices=slices
    )
    if shape.devices != devices:
        raise UserError(
            f"mesh {spec!r}: the axis sizes must multiply to the number of devices, {devices}, but are {equation}. "
            "Write -1 for one axis that may be of any size."
        )
    if shape.data % slices:
        raise UserError(
            f"mesh {spec!r}: `data` also goes over the slices, and data={shape.data} / slices={slices} is no whole "
            "number."
        )
    return shape


def check_heads(mesh: MeshShape, heads: Mapping[str, int | None]) -> None:
    """Raise UserError, with the equation, where the ``tensor`` axis would cut through an attention head.

    Args:
        mesh: The mesh.
        heads: Numbers of heads by their names in the model's config; None is not checked.
    """
    for name, count in heads.items():
        if count is not None and count % mesh.tensor:
            raise UserError(
                f"mesh '{mesh}': `tensor` gives each device whole attention heads, but {name}={count} / tensor="
                f"{mesh.tensor} is no whole number. Choose a `tensor` that divides it."
            )


MiB, GiB = 2**20, 2**30


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip.

    Args:
        name: As in a topology: "v6e".
        peak_flops: Of bfloat16 matrix products, in FLOP/s.
        memory: HBM that is left to programs, in bytes: libtpu 0.0.21 keeps a quarter of a GiB for itself, and says
            so where it refuses a program.
        memory_bandwidth: In bytes a second.
        link_bandwidth: Of all links to other chips together, in bytes a second in one direction: half of what is
            published as bidirectional.
        shapes: Slices that can be rented, from small to large.
        rented_as: How the names of its slices begin: "v5litepod" of a v5litepod-8.
    """

    name: str
    peak_flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    shapes: tuple[str, ...]
    rented_as: str

    @property
    def source(self) -> str:
        """Where the figures are from."""
        return f"https://cloud.google.com/tpu/docs/{self.name}"


_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)
CHIPS = {
    "v5e": Chip("v5e", 197e12, 16 * GiB - 258 * MiB, 819e9, 400e9 / 2, _2D, "v5litepod"),
    "v5p": Chip("v5p", 459e12, 96 * GiB - 263 * MiB, 2765e9, 1200e9 / 2, _3D, "v5p"),
    "v6e": Chip("v6e", 918e12, 63 * GiB // 2 - 260 * MiB, 1600e9, 800e9 / 2, _2D, "v6e"),
}


def peak_flops_of(rented_as: str | None) -> float | None:
    """Return the published peak of a chip, in FLOP/s, by how its slices are called; None where it is not here."""
    return next((chip.peak_flops for chip in CHIPS.values() if chip.rented_as == rented_as), None)


@dataclass(frozen=True)
class TpuSlice:
    """A slice: its chips and how they are arranged."""

    chip: Chip
    shape: str

    @property
    def chips(self) -> int:
        return prod(map(int, self.shape.split("x")))

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.shape}"

    @property
    def compiled_as(self) -> str:
        """The slice to name to libtpu, which knows none of one chip: the smallest one, and one chip of it."""
        return f"{self.chip.name}:2x2" if self.chips == 1 else str(self)


def parse_topology(text: str) -> TpuSlice:
    """Read ``"v6e:4x4"``.

    Raises:
        UserError: For a kind of chip whose figures are not here, or a shape that its slices do not have; the message
            says what works.
    """
    kind, colon, shape = text.strip().partition(":")
    chip = CHIPS.get(kind.lower())
    if chip is None or not colon:
        raise UserError(
            f"topology {text!r} is not of the form CHIP:SHAPE, as in v6e:4x4, with a chip of {', '.join(CHIPS)}."
        )
    if shape not in chip.shapes:
        raise UserError(
            f"topology {text!r}: slices of {chip.name} have the shapes {', '.join(chip.shapes)} ({chip.source})."
        )
    return TpuSlice(chip, shape)
