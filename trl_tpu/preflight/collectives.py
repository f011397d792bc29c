"""Read from compiled HLO, as text, what chips send each other. No library is needed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from .program import Collective

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "token": 0}
_SHAPE = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .+ \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+)$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}')


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: what it makes (its shape, as written), by which operation, from what."""

    name: str
    shape: str
    operation: str
    rest: str
    """Operands and attributes."""

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", _balanced(self.rest))


@dataclass(frozen=True)
class Computation:
    name: str
    is_entry: bool
    instructions: tuple[Instruction, ...]


def read_computations(hlo: str) -> dict[str, Computation]:
    """All computations of a module in HLO's text form."""
    found: dict[str, Computation] = {}
    header, lines = "", []
    for line in hlo.splitlines():
        if header and line.startswith("}"):
            name = _COMPUTATION.match(header)
            assert name is not None
            instructions = tuple(each for each in map(_instruction, lines) if each is not None)
            found[name[1]] = Computation(name[1], header.startswith("ENTRY"), instructions)
            header, lines = "", []
        elif header:
            lines.append(line)
        elif _COMPUTATION.match(line):
            header = line
    return found


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, text = match.groups()
    shape = _balanced(text, from_start=True) if text.startswith("(") else text.split(" ", 1)[0]
    operation, _, rest = text[len(shape) :].strip().partition("(")
    return Instruction(name, shape, operation, f"({rest}")


def _balanced(text: str, from_start: bool = True) -> str:
    """What is in the first pair of parentheses, with them."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: index + 1]
    return text


def collectives_of(hlo: str) -> tuple[Collective, ...]:
    """The collectives that one execution of a module runs on each chip, alike ones counted together.

    An asynchronous pair of start and done is one. In a loop each counts as often as the loop turns; a loop whose count
    the compiler did not write down counts once.
    """
    computations = read_computations(hlo)
    runs = _runs(computations)
    found: dict[Collective, int] = {}
    for computation in computations.values():
        shapes = {each.name: each.shape for each in computation.instructions}
        for instruction in computation.instructions:
            kind = instruction.operation.removesuffix("-start")
            if kind in KINDS and runs[computation.name]:
                for each in _read(kind, instruction, shapes):
                    found[each] = found.get(each, 0) + runs[computation.name]
    return tuple(
        Collective(each.kind, each.bytes, each.dtype, each.shape, each.groups, count, each.op_name)
        for each, count in found.items()
    )


def _runs(computations: dict[str, Computation]) -> dict[str, int]:
    """How often each computation runs in one execution of the module."""
    runs = dict.fromkeys(computations, 0)

    def add(name: str, times: int) -> None:
        runs[name] += times
        for instruction in computations[name].instructions:
            if instruction.operation.endswith(("-done", "-update")):
                continue  # names what its start ran
            turns = 1
            if instruction.operation == "while" and (count := _TRIP_COUNT.search(instruction.rest)):
                turns = int(count[1])
            for called in _called(instruction.rest):
                if called in computations:
                    add(called, times * turns)

    for computation in computations.values():
        if computation.is_entry:
            add(computation.name, 1)
    return runs


def _called(rest: str) -> Iterator[str]:
    for match in _CALLED.finditer(rest):
        yield match[1]
    for match in _BRANCHES.finditer(rest):
        yield from (name.strip().removeprefix("%") for name in match[1].split(","))


def _read(kind: str, instruction: Instruction, shapes: dict[str, str]) -> Iterator[Collective]:
    name = re.search(r'op_name="([^"]*)"', instruction.rest)
    groups = _groups(kind, instruction.rest)
    for dtype, dims in _moved(kind, instruction, shapes):
        yield Collective(kind, bytes_of(dtype, dims), dtype, dims, groups, 1, name[1] if name else "")


def _moved(kind: str, instruction: Instruction, shapes: dict[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays that count: results, of a reduce-scatter operands. A start's result has both, and more."""
    operands = [array for name in instruction.operands for array in arrays_of(shapes.get(name, ""))]
    if not operands:  # written with their shapes, or not in this computation
        operands = arrays_of(_balanced(instruction.rest))
    if kind == "reduce-scatter":
        return operands
    if not instruction.operation.endswith("-start"):
        return arrays_of(instruction.shape)
    results = arrays_of(instruction.shape)
    if kind == "all-reduce":
        return results  # its start is typed as its result
    return results[len(operands) : 2 * len(operands)] or results


def arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays in a shape, which may be a tuple: the type and the sizes of each."""
    plain = re.sub(r"\{[^{}]*\}", "", shape)  # layouts
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in _SHAPE.findall(plain)]


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of an array in bytes; types of HLO end with their bits."""
    bits = _BITS.get(dtype)
    if bits is None:
        number = re.search(r"\d+", dtype)
        bits = int(number[0]) if number else 8
    return prod(shape) * bits // 8


def _groups(kind: str, rest: str) -> tuple[tuple[int, ...], ...]:
    """The devices that take part together, from either spelling; of a permutation, those that a ring or swap joins."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)
        return _joined(_lists(pairs[1])) if pairs else ()
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", rest)
    if listed:
        return _lists(listed[1])
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if not tiled:
        return ()
    shape, dims, order = ([int(size) for size in part.split(",")] if part else [] for part in tiled.groups())
    devices = np.arange(prod(dims)).reshape(dims)
    if order:
        devices = devices.transpose(order)
    return tuple(tuple(group) for group in devices.reshape(shape[0], -1).tolist())


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(int(number) for number in group.split(",") if number.strip()) for group in re.findall(r"\{([^{}]*)\}", text)
    )


def _joined(pairs: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The sets of devices that pairs of source and target connect."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set(pair).union(*(group_of.get(device, set()) for device in pair))
        for device in joined:
            group_of[device] = joined
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))
