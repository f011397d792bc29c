"""TPU chips and slices: what Google publishes of them. A chip is what XLA sees as one device.

A v5p chip has two TensorCores, which work as one ("megacore"). Google's names of v5p slices count cores: a v5p-16 is 8
chips, topology v5p:2x2x2.
"""

from dataclasses import dataclass
from math import prod

from ..errors import UserError

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
class Topology:
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

    def larger(self) -> "list[Topology]":
        """Return the larger slices of these chips, the next one first."""
        slices = (Topology(self.chip, shape) for shape in self.chip.shapes)
        return [each for each in slices if each.chips > self.chips]


def parse_topology(text: str) -> Topology:
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
    return Topology(chip, shape)
