"""What a program for one chip does, read from the text of its HLO: what it sends, moves and holds."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<shape>\(.*?\)|\S+) (?P<operation>[\w\-]+)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^{}]*\})?")
_CALLED = re.compile(r"\b(?:calls|body)=%?([\w.\-]+)")
_VIEWS = ("parameter", "bitcast", "tuple", "get-tuple-element", "while", "constant")
_ON_CHIP = "S(1)"  # in a layout: a memory on the chip itself

# Bytes that each of n chips receives for each of a result's: all but its own part, and twice that of what is added up
# everywhere. https://doi.org/10.1016/j.jpdc.2008.09.002
_RECEIVED: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda n: 1 - 1 / n,
    "all-reduce": lambda n: 2 * (1 - 1 / n),
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: 1 - 1 / n,
    "collective-permute": lambda n: 1,
}


@dataclass(frozen=True)
class Visit:
    """A computation where it is executed.

    Args:
        times: How often in one execution of the program.
        turns: Of the loop that it is in.
        is_fused: Whether its results stay on the chip, being inside of one instruction.
    """

    name: str
    lines: list[str]
    times: int
    turns: int
    is_fused: bool


@dataclass(frozen=True)
class Array:
    """One array of a result: its type, its sizes, and where the compiler lays it."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str

    @property
    def bytes(self) -> float:
        bits = re.search(r"\d+", self.dtype)  # types of numbers say them: bf16, f8e4m3fn
        return prod(self.sizes) * (int(bits[0]) / 8 if bits else 1)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


def read_visits(hlo: str) -> list[Visit]:
    """All that one execution of a module runs, its entry first."""
    computations: dict[str, list[str]] = {}
    entry = ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif computations and _INSTRUCTION.match(line):
            lines.append(line)
    return list(_visits(computations, Visit(entry, computations[entry], 1, 1, False)))


def _visits(computations: Mapping[str, list[str]], visit: Visit) -> Iterator[Visit]:
    yield visit
    for line in visit.lines:
        called = _CALLED.search(line)
        if called is None or "-done(" in line:  # which names what its start ran
            continue
        name, lines = called[1], computations[called[1]]
        if " while(" in line:
            turns = _turns(line, computations)
            yield from _visits(computations, Visit(name, lines, visit.times * turns, turns, visit.is_fused))
        else:
            yield from _visits(computations, Visit(name, lines, visit.times, visit.turns, True))


def _turns(loop: str, computations: Mapping[str, list[str]]) -> int:
    """How often a loop turns: as the compiler wrote down, or until its counter is what its condition compares with."""
    if written := re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop):
        return int(written[1])
    condition, body = (
        "\n".join(computations[name]) for name in re.findall(r"\b(?:condition|body)=%?([\w.\-]+)", loop)
    )
    end = max(map(int, re.findall(r" constant\((\d+)\)", condition)), default=1)
    return ceil(end / _step(condition, body))


def _step(condition: str, body: str) -> int:
    """What a turn adds to the counter that a loop's condition compares; 1 where it is more than an addition."""

    def found(pattern: str, text: str) -> str:
        match = re.search(pattern, text)
        return match[1] if match else "nothing"

    counter = found(r" compare\(%([\w.\-]+), .*direction=LT", condition)
    place = found(rf"%{re.escape(counter)} = .* get-tuple-element\(.*index=(\d+)", condition)
    carried = re.findall(r"%([\w.\-]+)", found(r"ROOT .* tuple\((.*?)\)", body))
    if not place.isdigit() or int(place) >= len(carried):
        return 1
    added = found(rf"%{re.escape(carried[int(place)])} = \S+ add\(%[\w.\-]+, %([\w.\-]+)\)", body)
    step = found(rf"%{re.escape(added)} = \S+ constant\((\d+)\)", body)
    return int(step) if step.isdigit() else 1


def _made_by(line: str) -> tuple[str, list[Array]]:
    """The operation of an instruction, and what it makes."""
    found = _INSTRUCTION.match(line)
    assert found is not None, line
    arrays = [
        Array(dtype, tuple(map(int, filter(None, sizes.split(",")))), layout)
        for dtype, sizes, layout in _ARRAY.findall(found["shape"])
    ]
    return found["operation"], arrays


def _made(visits: list[Visit]) -> Iterator[tuple[Visit, str, str, Array]]:
    """Each array that is made, fused ones apart: where, by which line and operation."""
    for visit in visits:
        for line in visit.lines if not visit.is_fused else ():
            operation, arrays = _made_by(line)
            if operation not in _VIEWS and not operation.endswith("-start"):
                yield from ((visit, line, operation, array) for array in arrays)


def bytes_moved(visits: list[Visit]) -> float:
    """Bytes that one execution moves to and from a chip's memory, to about a tenth.

    What is made there is written and read once, what is copied to the chip itself is read once, and what is computed
    on the chip costs nothing. libtpu's own figure counts that too, and is many times as large.
    """
    moved = 0.0
    for visit, _, operation, array in _made(visits):
        size = array.bytes * visit.times
        if visit.turns > 1 and array.sizes[:1] == (visit.turns,):
            size /= visit.turns  # a stack of what all layers have, of which each turn replaces its own
        if _ON_CHIP not in array.layout:
            moved += 2 * size
        elif operation.endswith("-done"):
            moved += size
    return moved


def largest_buffers(visits: list[Visit], count: int = 12) -> tuple[tuple[str, int], ...]:
    """The largest arrays that are made in memory: what makes them, in words, and their bytes."""
    sizes: dict[str, int] = {}
    for _, line, operation, array in _made(visits):
        if _ON_CHIP not in array.layout:
            said = re.search(r'op_name="([^"]*)"', line)
            sizes[f"{array} {operation} {said[1] if said else ''}".strip()] = round(array.bytes)
    return tuple(sorted(sizes.items(), key=lambda each: -each[1])[:count])


def received(visits: list[Visit], mesh: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Bytes that a chip receives over its links at least: by the mesh axes that they go over, and by what sends them.

    What sends is said as an operation and an array, such as "all-gather bf16[512,256]".

    Devices are numbered as the mesh is laid out, its last axis fastest.
    """
    found: dict[str, dict[str, float]] = {}
    chains = set()
    for visit in visits:
        for line in visit.lines:
            operation, arrays = _made_by(line)
            kind = operation.removesuffix("-start")
            if kind not in _RECEIVED:
                continue
            if chain := re.search(r'\bchannel_id=(\d+)\b.*\bchain_id="(\d+)"', line):
                if chain.groups() in chains:
                    continue  # one gather is begun, waited for and ended by several fusions
                chains.add(chain.groups())
            if operation.endswith("-start") and kind != "all-reduce":  # it lists operands, results, and numbers
                arrays = [array for array in arrays if array.sizes]
                arrays = arrays[len(arrays) // 2 :]
            groups_GN = groups_of(line, prod(mesh.values()))
            axes = axes_of(groups_GN, mesh)
            times = visit.times * _RECEIVED[kind](groups_GN.shape[1])
            if visit.name.startswith("all-reduce-scatter"):  # of a sum only the chip's own part is kept
                kind, times = "reduce-scatter", times / 2
            for array in arrays if axes else ():
                sent = found.setdefault(axes, {})
                name = f"{kind} {array}"
                sent[name] = sent.get(name, 0.0) + times * array.bytes
    return found


def groups_of(line: str, chips: int) -> np.ndarray:
    """The devices that take part together, as the rows of an array; of a permutation, who sends to whom."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{(.*?)\}\}", line):
        return np.array([group.split(",") for group in listed[1].split("},{")], int)
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if tiled is None:
        return np.arange(chips)[None]
    shape, sizes, order = ([int(each) for each in part.split(",")] if part else None for part in tiled.groups())
    return np.arange(chips).reshape(sizes).transpose(order).reshape(shape)


def axes_of(groups_GN: np.ndarray, mesh: Mapping[str, int]) -> str:
    """The mesh axes along which devices of one group differ, joined by "+"."""
    places = np.unravel_index(groups_GN, tuple(mesh.values()))
    crossed = [(place_GN != place_GN[:, :1]).any() for place_GN in places]
    return "+".join(axis for axis, is_crossed in zip(mesh, crossed, strict=True) if is_crossed)
