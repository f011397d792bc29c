"""A deep model's program from those of two shallow ones: layers that are alike cost alike.

Compiling all layers of a large model takes long; what two depths need is extended in a straight line.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from .compile import CompiledProgram

_FEW = 8  # layers that are compiled as they are


def two_depths(config: Any) -> tuple[int, int] | None:
    """Numbers of layers to compile in the place of all, or None where all are few.

    Kinds of layers repeat with a period: between the two depths, and from there to all, are whole periods.
    """
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["layer"] * layers
    period = next(size for size in range(1, layers + 1) if all(kinds[i] == kinds[i % size] for i in range(layers)))
    more = max(period, 2)
    first = more if period == 1 else layers % period or period
    first += period if first < 2 else 0
    return (first, first + more) if layers > max(_FEW, first + more) else None


def with_layers(config: Any, layers: int) -> Any:
    """A copy of a model's config with its first ``layers`` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def compile_deep(
    compile_layers: Callable[[int], CompiledProgram], depths: tuple[int, int], layers: int, least: int = 0
) -> CompiledProgram:
    """The program of ``layers`` layers, from those of two ``depths``.

    Args:
        compile_layers: Compiles a number of layers.
        least: Bytes that all layers need at least. Where few layers need most for something else, as for embeddings,
            the straight line says less.
    """
    first, second = map(compile_layers, depths)
    times = (layers - depths[0]) / (depths[1] - depths[0])
    extended = {
        each.name: _extended(getattr(first, each.name), getattr(second, each.name), times)
        for each in fields(CompiledProgram)
    }
    made = CompiledProgram(**extended)
    return replace(made, temporary=made.temporary + max(least + made.generated_code - made.peak, 0))


def _extended(first: Any, second: Any, times: float) -> Any:
    if isinstance(first, Mapping):
        names = {**first, **second}
        nothing: Any = {} if isinstance(next(iter(names.values()), 0), Mapping) else 0
        return {name: _extended(first.get(name, nothing), second.get(name, nothing), times) for name in names}
    if isinstance(first, tuple):  # buffers, which are as large in every layer
        return second
    value = max(first + (second - first) * times, 0)
    return round(value) if isinstance(first, int) and isinstance(second, int) else value


def depth_note(depths: tuple[int, int], layers: int) -> str:
    """What a report says of it."""
    return (
        f"Compiled were {depths[0]} and {depths[1]} of the {layers} layers, and all figures, the time of compiling "
        "too, extended in a straight line; memory may be off, but is at least what is needed. "
        "With --scan_layers, or --all_layers, the whole program is compiled."
    )
