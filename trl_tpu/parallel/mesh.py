"""Shapes of device meshes, and published figures of TPU chips and slices."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..errors import UserError

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
    shape = MeshShape(
        **{axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}, slices=slices
    )
    if shape.devices != devices:
        raise UserError(
            f"mesh {spec!r}: the axis sizes must multiply to the number of devices, {devices}, but are {equation}. "
            "Write -1 for one axis that may be of any size."
        )
    return shape


def check_heads(mesh: MeshShape, heads: Mapping[str, int | None]) -> None:
    """Check that the ``tensor`` axis divides the numbers of attention heads.

    Args:
        mesh: The mesh.
        heads: Numbers of heads by their names in the model's config. None is not checked.

    Raises:
        UserError: The axis would split an attention head. The message shows the equation.
    """
    for name, count in heads.items():
        if count is not None and count % mesh.tensor:
            raise UserError(
                f"mesh '{mesh}': `tensor` must not split attention heads, but {name}={count} / tensor={mesh.tensor} "
                f"is not a whole number. Choose a `tensor` that divides it."
            )


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
        accelerator_prefix: Prefix of the accelerator type: "v5litepod" for a v5litepod-8.
    """

    name: str
    peak_flops: float
    memory: int
    link_bandwidth: float
    memory_bandwidth: float
    shapes: tuple[str, ...]
    accelerator_prefix: str

    @property
    def source(self) -> str:
        """URL of the page with the figures."""
        return f"https://cloud.google.com/tpu/docs/{self.name}"


_2D_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D_SHAPES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)
CHIPS = {
    "v5e": Chip("v5e", 197e12, 16 * GiB - 258 * MiB, 400e9 / 2, 819e9, _2D_SHAPES, "v5litepod"),
    "v5p": Chip("v5p", 459e12, 96 * GiB - 263 * MiB, 1200e9 / 2, 2765e9, _3D_SHAPES, "v5p"),
    "v6e": Chip("v6e", 918e12, 63 * GiB // 2 - 260 * MiB, 800e9 / 2, 1640e9, _2D_SHAPES, "v6e"),
}


def peak_flops_of(accelerator_prefix: str | None) -> float | None:
    """Return a chip's published peak rate in FLOP/s; None for an unknown chip.

    Args:
        accelerator_prefix: Prefix of the accelerator type; see `Chip`.
    """
    return next((chip.peak_flops for chip in CHIPS.values() if chip.accelerator_prefix == accelerator_prefix), None)


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
