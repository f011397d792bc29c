"""Read the collectives out of a compiled program, and say over which mesh axes each one goes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

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
            yield Collective(found["kind"], shapes, axes_of(groups_GN, mesh), groups_GN.shape[1])


def groups_of(line: str, devices: int) -> np.ndarray:
    """The devices that take part together, as the rows of an array; of a permutation, who sends to whom."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{(.*?)\}\}", line):
        return np.array([group.split(",") for group in listed[1].split("},{")], int)
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if tiled is None:
        return np.arange(devices)[None]
    shape, sizes, order = ([int(each) for each in part.split(",")] if part else None for part in tiled.groups())
    return np.arange(devices).reshape(sizes).transpose(order).reshape(shape)


def axes_of(groups_GN: np.ndarray, mesh: Mapping[str, int]) -> frozenset[str]:
    """The mesh axes along which devices of one group differ."""
    places = np.unravel_index(groups_GN, tuple(mesh.values()))
    crossed = [(place_GN != place_GN[:, :1]).any() for place_GN in places]
    return frozenset(axis for axis, is_crossed in zip(mesh, crossed, strict=True) if is_crossed)
