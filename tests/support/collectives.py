"""Read the collectives out of a compiled program, and say over which mesh axes each one goes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

_OPERATION = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective: the arrays that it gives each device, the axes along which its groups reach, and how many
    devices the largest group has."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    axes: frozenset[str]
    devices: int

    @property
    def elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


def read_collectives(hlo: str, mesh: Mapping[str, int]) -> Iterator[Collective]:
    """Every collective in the text of an optimised HLO module for devices that are numbered along ``mesh``."""
    for line in hlo.splitlines():
        if found := _OPERATION.search(line):
            arrays = _ARRAY.findall(re.sub(r"/\*.*?\*/", "", found["type"]))
            shapes = tuple(tuple(int(size) for size in sizes.split(",") if size) for _, sizes in arrays)
            groups = _groups(line)
            yield Collective(found["kind"], shapes, frozenset(_axes(groups, mesh)), max(map(len, groups), default=0))


def _groups(line: str) -> list[list[int]]:
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [[int(one) for one in pair.split(",")] for pair in re.findall(r"\{([\d,]+)", pairs[0])]
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [[int(one) for one in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota is not None, line
    shape, dims, order = ([int(one) for one in part.split(",")] if part else None for part in iota.groups())
    ids = np.arange(prod(dims)).reshape(dims).transpose(order)  # type: ignore[arg-type]
    return ids.reshape(shape).tolist()  # type: ignore[arg-type]


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> set[str]:
    place: Any = np.array(np.unravel_index(np.arange(prod(mesh.values())), tuple(mesh.values()))).T
    return {
        axis
        for group in groups
        for number, axis in enumerate(mesh)
        if len({int(place[device][number]) for device in group}) > 1
    }
