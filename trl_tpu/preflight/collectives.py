"""Read from compiled HLO what chips send each other, and what takes the most memory."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from .hlo import Computation, Instruction, arrays_of, bytes_of, in_parentheses
from .loops import read_module
from .program import Collective

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_CHAIN = re.compile(r'\bchannel_id=(\d+)\b.*\bchain_id="(\d+)"')
_NO_MEMORY = ("parameter", "bitcast", "tuple", "get-tuple-element", "while", "constant")


def collectives_of(hlo: str) -> tuple[Collective, ...]:
    """The collectives that one execution of a module runs on each chip, alike ones counted together.

    An asynchronous pair of start and done is one, and so is what a TPU runs in pieces inside fusions: they share a
    chain. An all-reduce of which the chip keeps its own part, which a TPU does as one operation, is a reduce-scatter.
    In a loop each counts as often as the loop turns.
    """
    module = read_module(hlo)
    found: dict[Collective, int] = {}
    chains: set[tuple[str, ...]] = set()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            kind = instruction.operation.removesuffix("-start")
            if kind not in KINDS or not module.runs[computation.name]:
                continue
            if chain := _CHAIN.search(instruction.rest):
                if chain.groups() in chains:
                    continue
                chains.add(chain.groups())
            for each in _read(kind, instruction, computation):
                found[each] = found.get(each, 0) + module.runs[computation.name]
    return tuple(replace(each, count=count) for each, count in found.items())


def _read(kind: str, instruction: Instruction, computation: Computation) -> Iterator[Collective]:
    groups = _groups(kind, instruction.rest)
    operands = _operand_arrays(instruction, computation.instructions)
    if kind == "all-reduce" and not computation.is_entry and _keeps_a_part(instruction, computation):
        kind = "reduce-scatter"
    moved = operands if kind == "reduce-scatter" else _results(kind, instruction, len(operands))
    for dtype, shape in moved:
        yield Collective(kind, bytes_of(dtype, shape), dtype, shape, groups, 1, instruction.op_name)


def _operand_arrays(instruction: Instruction, around: Mapping[str, Instruction]) -> list[tuple[str, tuple[int, ...]]]:
    named = [around[name] for name in instruction.operands if name in around]
    return [array for each in named for array in arrays_of(each.shape)] or arrays_of(in_parentheses(instruction.rest))


def _results(kind: str, instruction: Instruction, operands: int) -> list[tuple[str, tuple[int, ...]]]:
    """A start's shape has its operands, its results and more, but an all-reduce's the results only."""
    arrays = arrays_of(instruction.shape)
    if kind == "all-reduce" or not instruction.operation.endswith("-start"):
        return arrays
    return arrays[operands : 2 * operands]


def _keeps_a_part(instruction: Instruction, computation: Computation) -> bool:
    """Whether a fusion of an all-reduce returns a slice of it."""
    found = computation.root
    while found.operation in ("bitcast", "copy", "convert", "transpose", "reshape"):
        found = computation.instructions[found.operands[0]]
    return found.operation == "dynamic-slice" and instruction.name in found.operands


def _groups(kind: str, rest: str) -> tuple[tuple[int, ...], ...]:
    """The devices that take part together, from either spelling; of a permutation, those that its pairs connect."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)
        return _connected(_lists(pairs[1])) if pairs else ()
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", rest)
    if listed:
        return _lists(listed[1])
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if not tiled:
        return ()
    shape, sizes, order = ([int(size) for size in part.split(",")] if part else [] for part in tiled.groups())
    devices = np.arange(prod(sizes)).reshape(sizes)
    if order:
        devices = devices.transpose(order)
    return tuple(tuple(group) for group in devices.reshape(shape[0], -1).tolist())


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    groups = re.findall(r"\{([^{}]*)\}", text)
    return tuple(tuple(int(number) for number in group.split(",") if number.strip()) for group in groups)


def _connected(pairs: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set(pair).union(*(group_of.get(device, set()) for device in pair))
        for device in joined:
            group_of[device] = joined
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def largest_buffers(hlo: str, count: int = 12) -> tuple[tuple[str, int], ...]:
    """The largest arrays that a module makes, as "type[shape] operation op_name", and their bytes on one chip.

    What is made inside fusions takes no memory, and neither do other views of an array.
    """
    sizes: dict[str, int] = {}
    for computation, _ in read_module(hlo).executed():
        for each in computation.instructions.values():
            if each.operation in _NO_MEMORY:
                continue
            for dtype, shape in arrays_of(each.shape):
                text = f"{dtype}[{','.join(map(str, shape))}] {each.operation} {each.op_name}".strip()
                sizes[text] = bytes_of(dtype, shape)
    return tuple(sorted(sizes.items(), key=lambda item: -item[1])[:count])


__all__ = ["KINDS", "collectives_of", "largest_buffers"]
