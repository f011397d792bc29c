"""The long run (`make long-run`) tells what grows from what is flat."""

from long_run import ALLOWED, judge

STEPS = range(50, 2050, 50)
GROWTH = {
    "memory (MiB)": lambda step: 660 + step * 0.04,  # 44 MiB from median to median, 6 % of it
    "open files": lambda step: 7 + step // 400,  # one in eight saves
    "compiles": lambda step: 5 + (step > 1500),
}


def test_what_grows_after_a_steep_beginning_is_named() -> None:
    rows = [{"step": step, **dict.fromkeys(ALLOWED, 100.0 if step >= 300 else 50.0)} for step in STEPS]
    assert not [line for line in judge(rows) if "GROWS" in line]
    for row in rows:
        row.update({name: value(row["step"]) for name, value in GROWTH.items()})
    assert {line.split("  ")[0] for line in judge(rows) if "GROWS" in line} == set(GROWTH)
