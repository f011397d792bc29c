"""What asks a run to stop or save before its time; and the one spelling of durations."""

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu import forks
from trl_tpu.config.duration import parse_duration
from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.training import preemption
from trl_tpu.training.preemption import SAVE_INTERVAL, SIGTERM, TIME_LIMIT, Preemption

PARTS = st.tuples(*(st.integers(0, 999_999) for _ in "dhm"))


@given(PARTS.filter(any))
def test_a_duration_is_what_its_parts_add_up_to(parts: tuple[int, int, int]) -> None:
    text = "".join(f"{count}{unit}" for count, unit in zip(parts, "dhm", strict=True) if count)
    days, hours, minutes = parts
    assert parse_duration(text, "training_time_limit") == timedelta(minutes=minutes + 60 * (hours + 24 * days))


@pytest.mark.parametrize(
    "text",
    ["", "2", "2h 30m", "2h30", "30m2h", "1h1h", "2H", "2:30", "1.5h", "-1h", "0h", "02h", "90s", "1h\n", "٢h", "h",
     90, None, True],
)  # fmt: skip
def test_other_spellings_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="days, hours and minutes.*'2h30m', '1d', '90m'"):
        parse_duration(text, "training_time_limit")


def test_a_configuration_says_when_to_save_and_stop(tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path))
    assert (args.time_limit, args.save_interval) == (None, None)
    args = RewardConfig(str(tmp_path), training_time_limit="1d", save_interval_minutes=0.5)
    assert (args.time_limit, args.save_interval) == (timedelta(days=1), timedelta(seconds=30))
    with pytest.raises(ValueError, match="training_time_limit: '2 hours' is no duration"):
        RewardConfig(str(tmp_path), training_time_limit="2 hours")
    for minutes in (-5.0, float("nan")):
        with pytest.raises(ValueError, match="save_interval_minutes must be at least 0"):
            RewardConfig(str(tmp_path), save_interval_minutes=minutes)


# ---- requests


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, to be put forward."""
    now = [1000.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    return now


def requests_of(stops: Preemption, step: int) -> set[str]:
    stops.note_step(step, max_steps=10)
    return {name for name, is_requested in stops.requests.items() if is_requested}


def test_a_time_limit_is_of_one_training_and_stops_nothing_after_the_last_step(clock: list[float]) -> None:
    stops = Preemption(timedelta(hours=1), None)
    clock[0] += 3599
    assert requests_of(stops, 3) == set()
    clock[0] += 1
    assert requests_of(stops, 4) == {TIME_LIMIT}
    assert requests_of(stops, 10) == set()
    stops.start()
    assert requests_of(stops, 5) == set()


def test_an_interval_begins_with_the_last_save(clock: list[float]) -> None:
    stops = Preemption(None, timedelta(minutes=2))
    clock[0] += 119
    stops.note_save(3)
    assert stops.has_saved(3) and not stops.has_saved(4)
    clock[0] += 119
    assert requests_of(stops, 4) == set()
    clock[0] += 1
    assert requests_of(stops, 5) == {SAVE_INTERVAL}


def test_the_first_sigterm_is_a_request_and_the_second_is_what_it_was() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: arrived.append(number))
    try:
        stops = Preemption(None, None)
        with stops.hearing_sigterm(listens=True):
            os.kill(os.getpid(), signal.SIGTERM)
            assert requests_of(stops, 1) == {SIGTERM} and arrived == []
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert arrived == [signal.SIGTERM] * 2


def test_a_handler_is_set_in_the_main_thread_only_and_where_asked_for() -> None:
    found: list[Any] = []

    def look(listens: bool) -> None:
        with Preemption(None, None).hearing_sigterm(listens):
            found.append(signal.getsignal(signal.SIGTERM))

    look(True)
    look(False)
    thread = threading.Thread(target=look, args=(True,))
    thread.start()
    thread.join()
    own = signal.getsignal(signal.SIGTERM)
    assert [handler is own for handler in found] == [False, True, True]


def test_what_is_forked_while_it_hears_ends_by_sigterm() -> None:
    """A pool that a callback uses waits for its workers to end so."""
    with Preemption(None, None).hearing_sigterm(listens=True):
        if (worker := os.fork()) == 0:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM


def test_forks_keep_a_handler_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    forks.end_by_sigterm()
    monkeypatch.setattr(sys, "unraisablehook", lambda _: os._exit(9))  # what errors after a fork are given to
    arrived: list[Any] = []
    before = signal.signal(signal.SIGTERM, arrived.extend)  # which names no module
    try:
        if (worker := os.fork()) == 0:
            os._exit(signal.getsignal(signal.SIGTERM) != arrived.extend)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
