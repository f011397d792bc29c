"""How often each computation of an HLO module runs.

XLA writes down for some loops only how often they turn. A TPU keeps a 64-bit counter as two of 32 bits, so that a test
reads more than one number. Here each turn is gone through, for those numbers alone that the loop's condition hangs on.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add, and_, eq, ge, gt, le, lt, mul, ne, or_, sub, xor

from .hlo import Computation, Instruction, arrays_of, in_parentheses, read_computations

_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')
_MOST_TURNS = 100_000
_COMPARISONS = {"LT": lt, "LE": le, "GT": gt, "GE": ge, "EQ": eq, "NE": ne}
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": add, "subtract": sub, "multiply": mul, "and": and_, "or": or_, "xor": xor, "maximum": max, "minimum": min,
}  # fmt: skip
_SAME = ("copy", "bitcast", "bitcast-convert", "convert", "reshape", "broadcast")
_CALLS = ("fusion", "call")

#: What a computation is given: for each parameter a number, a tuple of them, or None where it is not known.
Given = list[int | None] | int | None


class _Unknown(Exception):
    """A value that is not made of known whole numbers."""


@dataclass(frozen=True)
class Module:
    """Computations by name, and how often each runs in one execution."""

    computations: Mapping[str, Computation]
    runs: Mapping[str, int]

    def executed(self) -> Iterator[tuple[Computation, int]]:
        """Those whose instructions a chip takes one by one, not those inside fusions, and how often."""
        instructions = [each for every in self.computations.values() for each in every.instructions.values()]
        inside = {each.attribute(name) for each in instructions for name in ("calls", "to_apply")}
        for computation in self.computations.values():
            if computation.name not in inside and self.runs[computation.name]:
                yield computation, self.runs[computation.name]


@lru_cache(maxsize=1)
def read_module(hlo: str) -> Module:
    """A module from its text, which several readers ask for one after the other."""
    computations = read_computations(hlo)
    return Module(computations, runs_of(computations))


def runs_of(computations: Mapping[str, Computation]) -> dict[str, int]:
    """How often each computation runs in one execution of the module.

    Each branch of a condition counts; a loop whose number of turns cannot be read counts as one turn.
    """
    runs = dict.fromkeys(computations, 0)

    def add(name: str, times: int) -> None:
        runs[name] += times
        computation = computations[name]
        for instruction in computation.instructions.values():
            if instruction.operation.endswith(("-done", "-update")):
                continue  # names what its start ran
            called = [each for each in _called(instruction.rest) if each in computations]
            if not called:
                continue
            turns = 1
            if instruction.operation == "while":
                read = turns_of(instruction, computation, computations)
                turns = 1 if read is None else read
            for each in called:
                add(each, times * turns)

    for computation in computations.values():
        if computation.is_entry:
            add(computation.name, 1)
    return runs


def _called(rest: str) -> Iterator[str]:
    for match in _CALLED.finditer(rest):
        yield match[1]
    for match in _BRANCHES.finditer(rest):
        yield from (name.strip().removeprefix("%") for name in match[1].split(","))


def turns_of(loop: Instruction, around: Computation, computations: Mapping[str, Computation]) -> int | None:
    """How often ``loop``, in the computation ``around``, turns; None if that hangs on more than known numbers."""
    if written := _TRIP_COUNT.search(loop.rest):
        return int(written[1])
    condition, body = (computations.get(loop.attribute(name)) for name in ("condition", "body"))
    start = around.instructions.get(loop.operands[0]) if loop.operands else None
    if condition is None or body is None or start is None or start.operation != "tuple":
        return None
    carried = [_known(_Values(around, computations, {}), name) for name in start.operands]
    read = _read_by(condition, body)
    for count in range(_MOST_TURNS):
        given: dict[int, Given] = {0: carried}
        goes_on = _known(_Values(condition, computations, given), condition.root.name)
        if goes_on is None:
            return None
        if not goes_on:
            return count
        turn = _Values(body, computations, given)
        carried = [_known(turn, name) if place in read else None for place, name in enumerate(body.root.operands)]
    return None


def _read_by(condition: Computation, body: Computation) -> set[int]:
    """The elements of what the loop carries that its condition hangs on, from one turn to the next."""
    read: set[int] = set()
    new = _elements(condition, [condition.root.name])
    while new - read:
        read |= new
        new = _elements(body, [body.root.operands[place] for place in read if place < len(body.root.operands)])
    return read


def _elements(computation: Computation, names: list[str]) -> set[int]:
    """The elements of its tuple that the values ``names`` are made of."""
    found, seen, open_ = set(), set(), list(names)
    while open_:
        each = computation.instructions.get(open_.pop())
        if each is None or each.name in seen:
            continue
        seen.add(each.name)
        whole = computation.instructions.get(each.operands[0]) if each.operands else None
        if each.operation == "get-tuple-element" and whole is not None and whole.operation == "parameter":
            found.add(int(each.attribute("index")))
        else:
            open_ += each.operands
    return found


def _known(values: "_Values", name: str) -> int | None:
    try:
        return values.of(name)
    except _Unknown:
        return None


class _Values:
    """The whole numbers in a computation.

    Args:
        given: Its parameters, by number.
    """

    def __init__(
        self, computation: Computation, computations: Mapping[str, Computation], given: Mapping[int, Given]
    ) -> None:
        self._computation, self._computations, self._given = computation, computations, given
        self._found: dict[str, int | None] = {}

    def of(self, name: str) -> int:
        """The value of the instruction ``name``."""
        if name not in self._found:
            # what is not known is looked for once: through fusions of fusions the ways to it double at each
            self._found[name] = self._looked_for(name)
        return _number(self._found[name])

    def _looked_for(self, name: str) -> int | None:
        instruction = self._computation.instructions.get(name)
        try:
            return None if instruction is None else _wrapped(self._computed(instruction), instruction.shape)
        except _Unknown:
            return None

    def _computed(self, each: Instruction) -> int:
        operation, operands = each.operation, each.operands
        if operation == "constant":
            return _literal(in_parentheses(each.rest).strip("() "))
        if operation == "parameter":
            return _number(self._given.get(int(in_parentheses(each.rest).strip("()"))))
        if operation == "get-tuple-element":
            return self._element(operands[0], int(each.attribute("index")))
        if operation in _SAME:
            return self.of(operands[0])
        if operation in _ARITHMETIC:
            return reduce(_ARITHMETIC[operation], map(self.of, operands))
        if operation == "not":
            return ~self.of(operands[0]) if not each.shape.startswith("pred") else int(not self.of(operands[0]))
        if operation == "compare":
            return int(_COMPARISONS[each.attribute("direction")](*map(self.of, operands)))
        if operation == "select":
            return self.of(operands[1 if self.of(operands[0]) else 2])
        if operation in _CALLS:
            inner = self._inside(each)
            return inner.of(inner._computation.root.name)
        raise _Unknown

    def _element(self, name: str, index: int) -> int:
        whole = self._computation.instructions.get(name)
        if whole is None:
            raise _Unknown
        if whole.operation == "tuple":
            return self.of(whole.operands[index])
        if whole.operation == "parameter":
            given = self._given.get(int(in_parentheses(whole.rest).strip("()")))
            return _number(given[index] if isinstance(given, list) and index < len(given) else None)
        if whole.operation in _CALLS:
            inner = self._inside(whole)
            if inner._computation.root.operation == "tuple":
                return inner.of(inner._computation.root.operands[index])
        raise _Unknown

    def _inside(self, call: Instruction) -> "_Values":
        name = call.attribute("calls") or call.attribute("to_apply")
        if name not in self._computations:
            raise _Unknown
        given: dict[int, Given] = {place: _known(self, operand) for place, operand in enumerate(call.operands)}
        return _Values(self._computations[name], self._computations, given)


def _literal(text: str) -> int:
    if text in ("true", "false"):
        return int(text == "true")
    try:
        return int(text)
    except ValueError:
        raise _Unknown from None


def _number(given: Given) -> int:
    if not isinstance(given, int):
        raise _Unknown
    return given


def _wrapped(value: int, shape: str) -> int:
    """``value`` in the type of ``shape``, which has to be a whole number or a truth value."""
    dtype = arrays_of(shape)[0][0]
    if dtype == "pred":
        return int(bool(value))
    if dtype[0] not in "su" or not dtype[1:].isdigit():
        raise _Unknown
    size = 1 << int(dtype[1:])
    value %= size
    return value - size if dtype[0] == "s" and value >= size // 2 else value
