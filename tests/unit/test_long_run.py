"""The long run (`make long-run`) tells what grows from what is flat."""

from typing import Any

import pytest
from long_run import ALLOWED, judge

STEPS = range(50, 2050, 50)


def measured(**growing: Any) -> list[dict[str, float]]:
    """What is flat after a steep beginning, but for measures that are functions of the step."""
    flat = {name: 100.0 for name in ALLOWED}
    return [
        {"step": step, "s": step / 10, **flat, **({"memory (MiB)": 50.0} if step < 300 else {})}
        | {name.replace("_", " "): value(step) for name, value in growing.items()}
        for step in STEPS
    ]


def growing(rows: list[dict[str, float]]) -> list[str]:
    return [line.split("  ")[0] for line in judge(rows) if line.endswith("GROWS")]


def test_flat_is_flat() -> None:
    assert growing(measured()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("open_files", lambda step: 7 + step // 400),  # one in eight saves
        ("threads", lambda step: 19 + step // 500),
        ("compiles", lambda step: 5 + (step > 1500)),
        ("objects", lambda step: 5e5 + 30 * step),
        ("memory_maps", lambda step: 2000 + step / 10),
    ],
)
def test_what_grows_is_named(name: str, value: Any) -> None:
    assert growing(measured(**{name: value})) == [name.replace("_", " ")]


def test_memory_may_not_grow_by_a_twentieth() -> None:
    rows = measured()
    for row, step in zip(rows, STEPS, strict=True):
        row["memory (MiB)"] = 660 + step * 0.04  # 44 MiB from median to median, 6 % of it
    assert growing(rows) == ["memory (MiB)"]
