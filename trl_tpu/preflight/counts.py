"""Read from compiled HLO what a chip computes and what it moves to and from its memory, loops turn by turn.

libtpu's own analysis counts the body of a loop once. What kernels compute, neither says: see `blocks`.
"""

import re
from collections.abc import Iterator, Mapping
from math import prod

from .hlo import Computation, Instruction, arrays_of, bytes_of, in_parentheses
from .loops import read_module

_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^{}]*\})?")  # with its layout
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")  # in a layout: in a memory on the chip itself
# what goes through an instruction untouched, such as what it gathers beside its own work: "{1}: (0, {})"
_PASSED_ON = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")
_VIEWS = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant", "while", "conditional", "call")
_WAITS = ("-done", "-update")


def flops_of(hlo: str) -> float:
    """Operations of matrix products, two for each multiply-add, of one execution on one chip, without kernels."""
    module = read_module(hlo)
    return sum(
        module.runs[computation.name] * _flops(each, computation)
        for computation in module.computations.values()
        for each in computation.instructions.values()
    )


def _flops(each: Instruction, around: Computation) -> float:
    if each.operation == "convolution":
        return _of_convolution(each, around)
    if each.operation == "dot":
        (_, result), (_, first) = arrays_of(each.shape)[0], arrays_of(around.instructions[each.operands[0]].shape)[0]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.rest)
        dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
        return 2.0 * prod(result) * prod(first[dim] for dim in dims)
    return 0.0


def _of_convolution(each: Instruction, around: Computation) -> float:
    """A product as a TPU has it: a convolution, whose window is over what other products run over as a batch.

    Counted are, as XLA's own analysis does, only places of the window that lie on numbers and not on padding.
    """
    left, right = (arrays_of(around.instructions[name].shape)[0][1] for name in each.operands[:2])
    result = arrays_of(each.shape)[0][1]
    labels = _LABELS.search(each.rest)
    assert labels is not None
    left_dims, right_dims, result_dims = (dict(zip(text, sizes, strict=True)) for text, sizes in zip(
        labels.groups(), (left, right, result), strict=True
    ))  # fmt: skip
    window = _window(each.rest)
    positions = 1.0
    for place, dim in enumerate(sorted(label for label in left_dims if label.isdigit())):
        settings = {name: values[place] for name, values in window.items()}
        positions *= _meetings(left_dims[dim], right_dims[dim], result_dims[dim], settings)
    return 2.0 * result_dims["b"] * result_dims["f"] * right_dims["i"] * positions


def _window(rest: str) -> dict[str, list[str]]:
    found = _WINDOW.search(rest)
    pairs = (word.split("=") for word in found[1].split()) if found else ()
    return {name: values.split("x") for name, values in pairs}


def _meetings(size: int, window: int, results: int, settings: Mapping[str, str]) -> int:
    """How often a window of ``window`` places lies on one of ``size`` numbers, over all ``results`` of its steps."""
    stride, apart, spread = (int(settings.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(settings.get("pad", "0_0").split("_")[0])
    count = 0
    for step in range(results):
        for place in range(window):
            at = step * stride + place * spread - low
            count += at % apart == 0 and 0 <= at // apart < size
    return count


def memory_traffic(hlo: str) -> float:
    """Bytes that one execution reads from a chip's memory and writes to it.

    What stays in memories on the chip itself costs nothing here. Of an array of which an instruction takes or replaces
    a slice only that slice is moved.
    """
    module = read_module(hlo)
    return sum(
        times * moved
        for computation, times in module.executed()
        for each in computation.instructions.values()
        for moved in _moved(each, computation, module.computations)
    )


def _moved(each: Instruction, around: Computation, computations: Mapping[str, Computation]) -> Iterator[int]:
    if each.operation in _VIEWS or each.operation.endswith(_WAITS):
        return
    if each.operation.endswith("slice-start"):
        yield from _slice_moved(each.shape)
        return
    if each.operation.endswith("-start"):  # its shape is what it reads and what it writes, each with its place
        yield _stored(each.shape)
        return
    fused = computations.get(each.attribute("calls")) if each.operation == "fusion" else None
    passed = {int(operand): result for result, operand in _PASSED_ON.findall(each.rest)}
    for place, name in enumerate(each.operands):
        operand = around.instructions.get(name)
        if operand is None or operand.operation == "constant" or place in passed:
            continue
        whole = _stored(operand.shape)
        part = _slice_of(fused, place) if fused is not None else _slice_here(each, place)
        yield whole if part is None else min(part, whole)
    roots = _roots(fused) if fused is not None else [each]
    for place, text in enumerate(_ARRAY.findall(each.shape)):
        if {str(place), ""} & set(passed.values()):  # "" is the only result
            continue
        replaced = _replaced(roots[place], fused or around) if place < len(roots) else None
        yield _stored(text) if replaced is None else min(replaced, _stored(text))


def _roots(fused: Computation) -> list[Instruction]:
    """What a fusion returns, one by one."""
    if fused.root.operation != "tuple":
        return [fused.root]
    return [fused.instructions[name] for name in fused.root.operands]


def _slice_moved(shape: str) -> Iterator[int]:
    """Of the start of an asynchronous slice, whose shape is its operands, its result, and more."""
    after = shape.removeprefix("(")[len(in_parentheses(shape.removeprefix("("))) :]
    result = _ARRAY.search(after)
    if result is not None:
        yield _size(result[0])
        yield _stored(result[0])


def _stored(shape: str) -> int:
    """Bytes of the arrays in ``shape`` that are in the chip's large memory."""
    return sum(_size(text) for text in _ARRAY.findall(shape) if not _ON_CHIP.search(text))


def _size(shape: str) -> int:
    return sum(bytes_of(dtype, sizes) for dtype, sizes in arrays_of(shape))


def _slice_here(each: Instruction, place: int) -> int | None:
    """What a slicing instruction reads of its operand; None where it is all of it."""
    if place == 0 and each.operation in ("dynamic-slice", "slice", "gather"):
        return _size(each.shape)
    return 0 if place == 0 and each.operation == "dynamic-update-slice" else None


def _slice_of(fused: Computation, place: int) -> int | None:
    """The same for a fusion's operand, if all that becomes of it are slices."""
    inner = next(
        (
            each
            for each in fused.instructions.values()
            if each.operation == "parameter" and in_parentheses(each.rest) == f"({place})"
        ),
        None,
    )
    if inner is None:
        return None
    total, open_ = 0, [inner.name]
    while open_:
        name = open_.pop()
        for each in fused.instructions.values():
            if name not in each.operands:
                continue
            if each.operation == "bitcast":
                open_.append(each.name)
                continue
            part = _slice_here(each, each.operands.index(name))
            if part is None:
                return None
            total += part
    return total


def _replaced(root: Instruction, around: Computation) -> int | None:
    """What an instruction writes that replaces a slice of an array in place; None where it is all of its result."""
    while root.operation == "bitcast":
        root = around.instructions[root.operands[0]]
    if root.operation != "dynamic-update-slice":
        return None
    return _size(around.instructions[root.operands[1]].shape)


__all__ = ["flops_of", "memory_traffic"]
