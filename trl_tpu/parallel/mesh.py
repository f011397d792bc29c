"""The device mesh as pure arithmetic: names and sizes of axes, checked without touching a device."""

import re
from collections.abc import Mapping
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
    asked = _read(spec)
    slices = asked.pop("slices", slices)
    sizes = {"data": slices, "fsdp": 1, "tensor": 1} | asked
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"mesh {spec!r}: only one axis can be -1, not {' and '.join(open_axes)}.")
    fixed = prod(size for size in sizes.values() if size != -1)
    equation = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if open_axes and devices % fixed:
        fault = f"{equation} leaves {devices}/{fixed}, no whole number, for {open_axes[0]} and there are {devices}"
    elif not open_axes and fixed != devices:
        fault = f"{equation} is {fixed} and there are {devices}"
    else:
        shape = MeshShape(**{axis: devices // fixed if size == -1 else size for axis, size in sizes.items()})
        if shape.data % slices == 0:
            return MeshShape(**shape.sizes, slices=slices)
        fault = f"`data` also goes over the slices, and data={shape.data} / slices={slices} is no whole number"
    raise UserError(
        f"mesh {spec!r}: the axis sizes must multiply to the number of devices, but {fault}. Write -1 for one axis "
        "that may be of any size."
    )


def check_heads(mesh: MeshShape, heads: Mapping[str, int]) -> None:
    """Refuse a ``tensor`` axis that would cut through an attention head.

    Args:
        mesh: The mesh.
        heads: Numbers of heads by their names in the model's config.

    Raises:
        UserError: With the equation.
    """
    for name, count in heads.items():
        if count % mesh.tensor:
            raise UserError(
                f"mesh '{mesh}': `tensor` gives each device whole attention heads, but {name}={count} / tensor="
                f"{mesh.tensor} is no whole number. Choose a `tensor` that divides {', '.join(heads)}."
            )


def _read(spec: str) -> dict[str, int]:
    """Return the sizes of the axes that ``spec`` names, and of `slices`."""
    sizes: dict[str, int] = {}
    for part in spec.replace(" ", "").split(","):
        found = _SIZE.fullmatch(part)
        if found is None or found[1] in sizes:
            raise UserError(
                f"mesh {spec!r}: {part!r} is not AXIS=SIZE, once for each axis: the axes are {', '.join(AXES)}, and a "
                "size is a positive integer, or -1 for what is left. `slices` is how many slices `data` goes over."
            )
        sizes[found[1]] = int(found[2])
    return sizes
