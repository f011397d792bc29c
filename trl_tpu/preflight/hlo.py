"""HLO in its text form: computations, their instructions, and how often each of them runs. No library is needed."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import eq, ge, gt, le, lt, ne

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .+ \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+)$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')
_COMPARISONS = {"LT": lt, "LE": le, "GT": gt, "GE": ge, "EQ": eq, "NE": ne}
_MOST_TURNS = 1_000_000
_BYTES = {"pred": 1.0, "token": 0.0, "opaque": 0.0}


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: what it makes (its shape, as written), by which operation, from what."""

    name: str
    shape: str
    operation: str
    rest: str
    """Operands and attributes."""

    @cached_property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", in_parentheses(self.rest))

    def attribute(self, name: str) -> str:
        """An attribute whose value is one word; "" if it has none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """What the compiler remembers it was made for."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in order; the last is the root where the text does not say otherwise."""

    name: str
    is_entry: bool
    instructions: Mapping[str, Instruction]
    root: Instruction

    def constant(self, name: str) -> int | None:
        """The value of a whole number, looking through copies."""
        found = self.instructions.get(name)
        while found is not None and found.operation in ("copy", "convert", "bitcast") and found.operands:
            found = self.instructions.get(found.operands[0])
        if found is None or found.operation != "constant":
            return None
        text = in_parentheses(found.rest).strip("()")
        return int(text) if re.fullmatch(r"-?\d+", text) else None


def read_computations(hlo: str) -> dict[str, Computation]:
    """All computations of a module by name."""
    found: dict[str, Computation] = {}
    header = ""
    lines: list[str] = []
    for line in hlo.splitlines():
        if header and line.startswith("}"):
            name = _COMPUTATION.match(header)
            assert name is not None
            found[name[1]] = _computation(name[1], header.startswith("ENTRY"), lines)
            header, lines = "", []
        elif header:
            lines.append(line)
        elif _COMPUTATION.match(line):
            header = line
    return found


def _computation(name: str, is_entry: bool, lines: list[str]) -> Computation:
    instructions, root = {}, None
    for line in lines:
        each = _instruction(line)
        if each is not None:
            instructions[each.name] = each
            root = each if root is None or line.lstrip().startswith("ROOT") else root
    assert root is not None, f"computation {name} is empty"
    return Computation(name, is_entry, instructions, root)


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, text = match.groups()
    shape = in_parentheses(text) if text.startswith("(") else text.split(" ", 1)[0]
    operation, _, rest = text[len(shape) :].strip().partition("(")
    return Instruction(name, shape, operation, f"({rest}")


def in_parentheses(text: str) -> str:
    """The first pair of parentheses with what is in it, of a text that begins with one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return text[: match.end()]
    return text


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
                turns = turns_of(instruction, computation, computations) or 1
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
    """How often a while loop turns: written down, or counted from its start, step and end; None if neither goes."""
    if written := _TRIP_COUNT.search(loop.rest):
        return int(written[1])
    condition, body = (computations.get(loop.attribute(name)) for name in ("condition", "body"))
    start = around.instructions.get(loop.operands[0]) if loop.operands else None
    if condition is None or body is None or start is None or start.operation != "tuple":
        return None

    def known(computation: Computation, name: str) -> int | None:
        """A constant, or one that the loop carries along unchanged."""
        value = computation.constant(name)
        index = _element(computation, name)
        if value is None and index is not None and _element(body, body.root.operands[index]) == index:
            value = around.constant(start.operands[index])
        return value

    test = condition.root
    compare = _COMPARISONS.get(test.attribute("direction")) if test.operation == "compare" else None
    if compare is None or len(test.operands) != 2 or body.root.operation != "tuple":
        return None
    counter = _element(condition, test.operands[0])
    end = known(condition, test.operands[1])
    if counter is None or end is None:
        return None
    value, step = around.constant(start.operands[counter]), _step(body, counter, known)
    if value is None or not step:
        return None
    turns = 0
    while compare(value, end) and turns < _MOST_TURNS:
        value, turns = value + step, turns + 1
    return turns if turns < _MOST_TURNS else None


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the loop's tuple a value is, as it came in."""
    found = computation.instructions.get(name)
    while found is not None and found.operation in ("copy", "bitcast") and found.operands:
        found = computation.instructions.get(found.operands[0])
    if found is None or found.operation != "get-tuple-element":
        return None
    whole = computation.instructions.get(found.operands[0])
    if whole is None or whole.operation != "parameter":
        return None
    return int(found.attribute("index"))


def _step(body: Computation, counter: int, known: Callable[[Computation, str], int | None]) -> int | None:
    """What a turn adds to the loop's counter."""
    new = body.instructions.get(body.root.operands[counter])
    while new is not None and new.operation == "copy":
        new = body.instructions.get(new.operands[0])
    if new is None or new.operation not in ("add", "subtract") or _element(body, new.operands[0]) != counter:
        return None
    added = known(body, new.operands[1])
    return added if added is None or new.operation == "add" else -added


def arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays in a shape, which may be a tuple: the type and the sizes of each."""
    plain = re.sub(r"\{[^{}]*\}", "", shape)  # layouts
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in _SHAPE.findall(plain)]


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of an array in bytes. Types of numbers say their bits: bf16, f8e4m3fn."""
    bits = re.search(r"\d+", dtype)
    size = _BYTES.get(dtype, int(bits[0]) / 8 if bits else 1.0)
    return int(prod(shape) * size)
