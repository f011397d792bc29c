"""What asks a run to stop or save before its time, the one spelling of durations, and hosts that decide as one."""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from meeting import Host, Meeting
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from trl_tpu.config.reward_config import RewardConfig, parse_duration
from trl_tpu.training import stopping
from trl_tpu.training.stopping import HostAgreement, Preemption, end_forks_by_sigterm

PARTS = st.tuples(*(st.integers(0, 999_999) for _ in "dhm"))


@given(PARTS.filter(any))
def test_a_duration_is_what_its_parts_add_up_to(parts: tuple[int, int, int]) -> None:
    text = "".join(f"{count}{unit}" for count, unit in zip(parts, "dhm", strict=True) if count)
    days, hours, minutes = parts
    assert parse_duration(text, "training_time_limit") == timedelta(minutes=minutes + 60 * (hours + 24 * days))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("training_time_limit", value) for value in ("", "2", "2h 30m", "2h30", "30m2h", "1h1h", "2H", "2:30")),
        *(
            ("training_time_limit", value)
            for value in ("1.5h", "-1h", "0h", "02h", "90s", "1h\n", "٢h", "h", 90, True)
        ),
        *(("save_interval_minutes", value) for value in (-5.0, np.nan)),
    ],
)
def test_other_spellings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        RewardConfig("out", **{name: value})


def test_a_configuration_says_when_to_save_and_stop() -> None:
    args = RewardConfig("out", training_time_limit="1d", save_interval_minutes=0.5)
    assert (args.time_limit, args.save_interval) == (timedelta(days=1), timedelta(seconds=30))
    assert (RewardConfig("out").time_limit, RewardConfig("out").save_interval) == (None, None)


# ---- SIGTERM


def test_a_handler_is_set_in_the_main_thread_only_and_where_asked_for() -> None:
    def handler(listens: bool) -> Any:
        with Preemption(None, None).hearing_sigterm(listens):
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        found = [handler(True), handler(False), pool.submit(handler, True).result()]
    own = signal.getsignal(signal.SIGTERM)
    assert [each is own for each in found] == [False, True, True]


def test_what_is_forked_while_it_hears_ends_by_sigterm() -> None:
    """A pool that a callback uses waits for its workers to end so."""
    with Preemption(None, None).hearing_sigterm(listens=True):
        if (worker := os.fork()) == 0:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM


def test_forks_keep_a_handler_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    end_forks_by_sigterm()
    monkeypatch.setattr(sys, "unraisablehook", lambda _: os._exit(9))  # what errors after a fork are given to
    arrived: list[Any] = []
    before = signal.signal(signal.SIGTERM, arrived.extend)  # which names no module
    try:
        if (worker := os.fork()) == 0:
            os._exit(signal.getsignal(signal.SIGTERM) != arrived.extend)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0


# ---- hosts: threads, which meet as processes do


def decide_together(
    hosts: int, steps: int, asks: Callable[[int, int, TrainerControl], bool]
) -> tuple[list[list[Any]], Meeting]:
    """Return what each host decides at the end of each step; all take the same steps, or this would not end.

    Args:
        asks: Of a host and a step: sets what a callback asks for there, and returns whether a SIGTERM has come.
    """
    meeting = Meeting(hosts)
    args = TrainingArguments("out", use_cpu=True, report_to="none", logging_steps=10, save_strategy="no")

    def run(index: int) -> list[Any]:
        agreed = HostAgreement(Host(index, meeting), create_autospec(Accelerator, instance=True, num_processes=1))
        agreed.start(0)
        state, decided = TrainerState(max_steps=steps, logging_steps=args.logging_steps), []
        for step in range(1, steps + 1):
            state.global_step, state.epoch = step, step / (steps + 1)
            control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
            told = asks(index, step, control)
            requests = agreed.decide(args, state, control, {"SIGTERM": told})
            decided.append((step, control.should_save, control.should_log, control.should_training_stop, requests))
            if control.should_training_stop or requests["SIGTERM"]:
                break
        return decided

    with ThreadPoolExecutor(hosts) as pool:
        return list(pool.map(run, range(hosts))), meeting


def test_what_one_host_asks_for_all_do_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_two_hosts` has real hosts. Hosts meet after step 1, then every few seconds."""
    clock = itertools.count()
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(clock) * 0.01)

    def asks(host: int, step: int, control: TrainerControl) -> bool:
        control.should_save |= host == 1 and step == 5
        return host == 0 and step >= 23

    decided, meeting = decide_together(3, 40, asks)
    assert all(of_host == decided[0] for of_host in decided)
    (saved,) = (step for step, saves, *_ in decided[0] if saves)
    assert 5 <= saved <= 10  # at the log at the latest
    last, *_, requests = decided[0][-1]
    assert 23 <= last <= 30 and requests == {"SIGTERM": True}
    assert [step for step, _, logs, *_ in decided[0] if logs] == [step for step in (10, 20, 30) if step <= last]
    assert 3 <= meeting.times <= 20
    decided, meeting = decide_together(1, 7, lambda host, step, control: step == 3)
    assert [step for step, *_ in decided[0]] == [1, 2, 3] and meeting.times == 0
