"""A deep model's program from two shallow ones: layers are alike, so what the compiler says grows by the layer."""

from dataclasses import fields, replace

from .program import Collective, CompiledProgram


def extrapolate(
    shallow: CompiledProgram, deeper: CompiledProgram, depths: tuple[int, int], depth: int
) -> CompiledProgram:
    """What a program of ``depth`` layers would be, on the line through two that were compiled.

    What is fitted is no compiler's word: it may place a deep model's collectives otherwise, and where memory runs out
    it recomputes, which a shallow model does not show. The time to compile is fitted too, and is usually longer.

    Args:
        shallow, deeper: Of the same step, but for the number of layers.
        depths: Their layers, the fewer first.
        depth: The layers that are asked for.

    Raises:
        ValueError: If the depths do not ascend.
    """
    first, second = depths
    if not 0 < first < second <= depth:
        raise ValueError(f"Depths to fit must ascend to the one asked for, got {first} and {second} for {depth}.")

    def fit(low: float, high: float) -> float:
        return max(0.0, low + (high - low) * (depth - first) / (second - first))

    numbers = {
        field.name: type(getattr(shallow, field.name))(fit(getattr(shallow, field.name), getattr(deeper, field.name)))
        for field in fields(CompiledProgram)
        if isinstance(getattr(shallow, field.name), int | float)
    }
    counts = [_counts(shallow), _counts(deeper)]
    alike = {key: round(fit(*(count.get(key, 0) for count in counts))) for key in counts[1] | counts[0]}
    collectives = tuple(replace(each, count=count) for each, count in alike.items() if count)
    return replace(deeper, **numbers, collectives=collectives)


def _counts(program: CompiledProgram) -> dict[Collective, int]:
    """How many there are of each kind, size and group, whichever layer they are for."""
    counts: dict[Collective, int] = {}
    for each in program.collectives:
        key = replace(each, count=1, op_name="")
        counts[key] = counts.get(key, 0) + each.count
    return counts


__all__ = ["extrapolate"]
