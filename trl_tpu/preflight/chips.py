"""TPU chips and slices: what Google publishes of them. A chip is what XLA sees as one device.

A v5p chip has two TensorCores, which work as one ("megacore"). Google's names of v5p slices count cores: a v5p-16 is 8
chips, topology v5p:2x2x2.
"""

import re
from dataclasses import dataclass
from math import prod

from trl_tpu.errors import UserError

GB, MiB, GiB = 10**9, 2**20, 2**30


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
        shapes: Slices that can be rented, or the largest of them.
        source: Where the figures are from.
    """

    name: str
    peak_flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    shapes: tuple[str, ...]
    source: str


_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 16 * GiB - 258 * MiB, 819e9, 400e9 / 2, _2D, "https://cloud.google.com/tpu/docs/v5e"),
        Chip("v5p", 459e12, 96 * GiB - 263 * MiB, 2765e9, 1200e9 / 2, _3D, "https://cloud.google.com/tpu/docs/v5p"),
        Chip(
            "v6e", 918e12, 63 * GiB // 2 - 260 * MiB, 1600e9, 800e9 / 2, _2D, "https://cloud.google.com/tpu/docs/v6e"
        ),
    )
}


@dataclass(frozen=True)
class Topology:
    """A slice: its chips and how they are arranged."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def compiled_as(self) -> str:
        """The slice to name to libtpu, which knows none of one chip: the smallest one, and one chip of it."""
        return f"{self.chip.name}:2x2" if self.chips == 1 else str(self)

    def larger(self) -> "Topology | None":
        """The next larger slice of these chips."""
        slices = [parse_topology(f"{self.chip.name}:{shape}") for shape in self.chip.shapes]
        return next((each for each in sorted(slices, key=lambda each: each.chips) if each.chips > self.chips), None)


def parse_topology(text: str) -> Topology:
    """Read ``"v6e:4x4"``.

    Raises:
        UserError: For a kind of chip whose figures are not here, or a shape that its slices do not have; the message
            says what works.
    """
    kind, colon, shape = text.strip().partition(":")
    chip = CHIPS.get(kind.lower())
    if chip is None or not colon:
        count = re.fullmatch(r"(v\d\w*?)(?:itepod)?-(\d+)", text.strip())
        hint = f" {text!r} is the name of a slice; a topology says its shape." if count else ""
        raise UserError(
            f"topology {text!r} is not of the form CHIP:SHAPE, as in v6e:4x4, with a chip of {', '.join(CHIPS)}.{hint}"
        )
    if shape not in chip.shapes:
        raise UserError(
            f"topology {text!r}: slices of {chip.name} have the shapes {', '.join(chip.shapes)} ({chip.source})."
        )
    return Topology(chip, tuple(int(size) for size in shape.split("x")))
