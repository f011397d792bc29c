"""The device mesh as pure arithmetic: names and sizes of axes, checked without touching a device."""

import difflib
from dataclasses import dataclass
from math import prod

#: Every axis, slowest first. A batch goes over `data` and `fsdp` together; weights are split over `fsdp`.
AXES = ("data", "fsdp")


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh axes, in the order of `AXES`; their product is the number of devices."""

    data: int = 1
    fsdp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        return prod(self.sizes.values())

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that the batch is split over."""
        return AXES

    @property
    def batch_shards(self) -> int:
        """How many parts a batch is split into: one for each device of the batch axes."""
        return prod(self.sizes[axis] for axis in self.batch_axes)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())


def parse_mesh(spec: str, devices: int) -> MeshShape:
    """Read a mesh written as ``"fsdp=-1"`` or ``"data=2,fsdp=4"``; one axis may be -1, which takes what is left.

    Args:
        spec: Axis sizes, separated by commas. An axis that is not named has size 1.
        devices: The number of devices to arrange.

    Raises:
        ValueError: For an unknown or repeated axis, a size that is not a positive integer or -1, or sizes that do
            not multiply to ``devices``; the message shows the equation and meshes that work.
    """
    sizes = dict.fromkeys(AXES, 1)
    seen: set[str] = set()
    for part in spec.split(","):
        axis, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"mesh {spec!r}: {part.strip()!r} is not of the form axis=size; write e.g. 'fsdp=-1'.")
        if axis not in sizes:
            near = difflib.get_close_matches(axis, AXES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"mesh {spec!r}: unknown axis {axis!r}; the axes are {', '.join(AXES)}.{hint}")
        if axis in seen:
            raise ValueError(f"mesh {spec!r}: axis {axis!r} is given twice.")
        seen.add(axis)
        if not text.removeprefix("-").isdecimal() or (int(text) < 1 and int(text) != -1):
            raise ValueError(
                f"mesh {spec!r}: the size of {axis!r} must be a positive integer, or -1 for what is left."
            )
        sizes[axis] = int(text)
    return MeshShape(**_fill(spec, sizes, devices))


def _fill(spec: str, sizes: dict[str, int], devices: int) -> dict[str, int]:
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh {spec!r}: only one axis can be -1, not {' and '.join(open_axes)}.")
    fixed = prod(size for size in sizes.values() if size != -1)
    equation = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if open_axes and devices % fixed == 0:
        return sizes | {open_axes[0]: devices // fixed}
    if not open_axes and fixed == devices:
        return sizes
    relation = f"leaves {devices}/{fixed}, no whole number, for {open_axes[0]}" if open_axes else f"is {fixed}"
    working = [f"data={size},fsdp={devices // size}" for size in range(1, devices + 1) if devices % size == 0]
    raise ValueError(
        f"mesh {spec!r}: the axis sizes must multiply to the number of devices, but {equation} {relation} and there "
        f"are {devices}. Meshes that work: {'; '.join(working[:6])}; or 'fsdp=-1'."
    )
