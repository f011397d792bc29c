"""HLO in its text form: computations and their instructions. No library is needed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .+ \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+)$")
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


def arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays in a shape, which may be a tuple: the type and the sizes of each."""
    plain = re.sub(r"\{[^{}]*\}", "", shape)  # layouts
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in _SHAPE.findall(plain)]


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of an array in bytes. Types of numbers say their bits: bf16, f8e4m3fn."""
    bits = re.search(r"\d+", dtype)
    size = _BYTES.get(dtype, int(bits[0]) / 8 if bits else 1.0)
    return int(prod(shape) * size)
