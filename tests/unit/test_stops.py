"""Durations have one spelling; what else a configuration may say of stops is refused with the rule."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.trainer.reward_config import RewardConfig
from trl_tpu.training.preemption import parse_duration

PARTS = st.tuples(*(st.integers(0, 999_999) for _ in "dhm"))


@given(PARTS.filter(any))
def test_a_duration_is_what_its_parts_add_up_to(parts: tuple[int, int, int]) -> None:
    text = "".join(f"{count}{unit}" for count, unit in zip(parts, "dhm", strict=True) if count)
    days, hours, minutes = parts
    assert parse_duration(text) == timedelta(minutes=minutes + 60 * (hours + 24 * days))


@given(st.one_of(st.text(), st.text("0123456789dhm .-+_:", max_size=8), st.integers(), st.floats(), st.none()))
def test_all_that_is_accepted_is_spelled_one_way(text: Any) -> None:
    try:
        duration = parse_duration(text)
    except ValueError as error:
        assert "2h30m" in str(error)
        return
    parts = text.replace("d", "d ").replace("h", "h ").replace("m", "m ").split(" ")[:-1]
    units = [part[-1] for part in parts]
    assert units == [unit for unit in "dhm" if unit in units]
    assert all(part[:-1] == str(int(part[:-1])) for part in parts)
    minutes = {"d": 24 * 60, "h": 60, "m": 1}
    total = sum(int(part[:-1]) * minutes[part[-1]] for part in parts)
    assert duration == timedelta(minutes=total) > timedelta(0)


@pytest.mark.parametrize(
    "text",
    ["", "2", "150", "2h 30m", " 2h", "2h30", "30m2h", "1h1h", "2H", "2:30", "1.5h", "-1h", "0h", "0h5m", "02h", "90s",
     "1h\n", "٢h", "1w", "2 hours", "PT2H", "1000000m", "h", 90, None, True],
)  # fmt: skip
def test_other_spellings_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="days, hours and minutes.*'2h30m', '1d', '90m'"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training_time_limit": "2 hours"}, "training_time_limit: '2 hours' is no duration"),
        ({"training_time_limit": 90}, "training_time_limit: 90 is no duration"),
        ({"save_interval_minutes": 0}, "save_interval_minutes must be above 0"),
        ({"save_interval_minutes": -5.0}, "save_interval_minutes must be above 0"),
        ({"save_interval_minutes": float("nan")}, "save_interval_minutes must be above 0"),
        ({"save_interval_minutes": float("inf")}, "at most 525600, a year"),
    ],
)
def test_a_configuration_says_when_to_save_and_stop_or_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(str(tmp_path), **settings)


def test_without_limits_there_are_none(tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path))
    assert (args.time_limit, args.save_interval) == (None, None)
    args = RewardConfig(str(tmp_path), training_time_limit="1d", save_interval_minutes=0.5)
    assert (args.time_limit, args.save_interval) == (timedelta(days=1), timedelta(seconds=30))
