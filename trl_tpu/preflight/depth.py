"""A deep model's program from those of two shallow ones: layers that are alike cost alike.

Compiling all layers of a large model takes long; what two depths need is extended in a straight line.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .program import Collective, CompiledProgram
from .report import peak_memory

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
    less, more = depths
    first, second = compile_layers(less), compile_layers(more)
    times = (layers - less) / (more - less)

    def extended(name: str) -> float:
        start, end = getattr(first, name), getattr(second, name)
        return max(start + (end - start) * times, 0)

    made = CompiledProgram(
        arguments=round(extended("arguments")),
        outputs=round(extended("outputs")),
        aliased=round(extended("aliased")),
        temporary=round(extended("temporary")),
        generated_code=round(extended("generated_code")),
        flops=extended("flops"),
        bytes_accessed=extended("bytes_accessed"),
        collectives=_extended(first.collectives, second.collectives, times),
        compile_seconds=extended("compile_seconds"),
        weights=round(extended("weights")),
        optimizer=round(extended("optimizer")),
        gradients=round(extended("gradients")),
        idle=round(extended("idle")),
        largest_buffers=second.largest_buffers,
    )
    missing = least + made.generated_code - peak_memory(made)
    return replace(made, temporary=made.temporary + max(missing, 0))


def _extended(first: Iterable[Collective], second: Iterable[Collective], times: float) -> tuple[Collective, ...]:
    """All bytes of a kind, type and grouping together, since compilers combine them differently at each depth."""
    start, end = _bytes(first), _bytes(second)
    made = []
    for kind, dtype, groups in dict.fromkeys([*start, *end]):
        key = (kind, dtype, groups)
        size = round(start[key] + (end[key] - start[key]) * times)
        if size > 0:
            made.append(Collective(kind, size, dtype, (), groups))
    return tuple(made)


def _bytes(collectives: Iterable[Collective]) -> Counter:
    sums: Counter = Counter()
    for each in collectives:
        sums[each.kind, each.dtype, each.groups] += each.bytes * each.count
    return sums


def depth_note(depths: tuple[int, int], layers: int) -> str:
    """What a report says of it."""
    return (
        f"Compiled were {depths[0]} and {depths[1]} of the {layers} layers, and all figures, the time of compiling "
        "too, extended in a straight line; memory may be off, but is at least what is needed. "
        "With --scan_layers, or --all_layers, the whole program is compiled."
    )


__all__ = ["compile_deep", "depth_note", "two_depths", "with_layers"]
