"""Read the collectives out of a compiled program, and say over which mesh axes each one goes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from trl_tpu.plan.hlo import axes_of, groups_of

_OPERATION = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective: the arrays that it gives each device, the axes along which its groups reach, and how many
    devices a group has."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    axes: frozenset[str]
    devices: int

    @property
    def elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


def read_collectives(hlo: str, mesh: Mapping[str, int]) -> Iterator[Collective]:
    """Every collective in the text of an optimized HLO module for devices that are numbered along ``mesh``."""
    for line in hlo.splitlines():
        if found := _OPERATION.search(line):
            sizes = _ARRAY.findall(re.sub(r"/\*.*?\*/", "", found["type"]))
            shapes = tuple(tuple(int(size) for size in each.split(",") if size) for each in sizes)
            groups_GN = groups_of(line, prod(mesh.values()))
            axes = frozenset(filter(None, axes_of(groups_GN, mesh).split("+")))
            yield Collective(found["kind"], shapes, axes, groups_GN.shape[1])
