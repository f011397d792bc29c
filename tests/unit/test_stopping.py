"""Early stops and saves, the format of durations, and votes of hosts."""

import itertools
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import create_autospec

import pytest
from accelerate import Accelerator
from fake_hosts import AllGather, Host
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.training import stopping
from trl_tpu.training.stopping import HostAgreement, Preemption, end_forks_by_sigterm

PARTS = st.tuples(*(st.integers(0, 999_999) for _ in "dhm"))


@settings(deadline=None)
@given(PARTS.filter(any))
def test_duration_is_the_sum_of_its_parts(parts: tuple[int, int, int]) -> None:
    text = "".join(f"{count}{unit}" for count, unit in zip(parts, "dhm", strict=True) if count)
    days, hours, minutes = parts
    limit = RewardConfig("out", training_time_limit=text).time_limit
    assert limit == timedelta(minutes=minutes + 60 * (hours + 24 * days))


def test_config_sets_when_to_stop() -> None:
    assert RewardConfig("out", training_time_limit="1d").time_limit == timedelta(days=1)
    assert RewardConfig("out").time_limit is None


# ---- SIGTERM


def test_sigterm_handler_is_set_in_the_main_thread_on_request() -> None:
    def handler(listens: bool) -> Any:
        with Preemption(RewardConfig("out")).handle_sigterm(listens):
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        found = [handler(True), handler(False), pool.submit(handler, True).result()]
    own = signal.getsignal(signal.SIGTERM)
    assert [each is own for each in found] == [False, True, True]


def test_forks_during_training_end_by_sigterm() -> None:
    """A process pool in a callback relies on it to end its workers."""
    with Preemption(RewardConfig("out")).handle_sigterm(listens=True):
        if (worker := os.fork()) == 0:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM


def test_forks_keep_a_users_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    end_forks_by_sigterm()
    monkeypatch.setattr(sys, "unraisablehook", lambda _: os._exit(9))  # called with errors after a fork
    arrived: list[Any] = []
    before = signal.signal(signal.SIGTERM, arrived.extend)  # a handler without a module name
    try:
        if (worker := os.fork()) == 0:
            os._exit(signal.getsignal(signal.SIGTERM) != arrived.extend)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0


# ---- hosts: threads that gather values as processes do


def test_request_of_one_host_applies_to_all_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts vote after step 1, then every few seconds and at each log. `test_two_hosts.py` has real hosts."""
    clock, all_gather = itertools.count(), AllGather(3)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(clock) * 0.01)
    args = TrainingArguments("out", use_cpu=True, report_to="none", logging_steps=10, save_strategy="no")
    state, accelerator = TrainerState(max_steps=40, logging_steps=10), create_autospec(Accelerator, num_processes=1)

    def run(index: int) -> list[tuple[int, bool]]:
        """All hosts must take the same steps, or this would not end."""
        agreed, decided = HostAgreement(Host(index, all_gather), accelerator), []
        agreed.start(0)
        for step in range(1, 41):
            control = TrainerControl(should_save=index == 1 and step == 5)
            told = {"SIGTERM": index == 0 and step >= 23}
            told = agreed.decide(args, replace(state, global_step=step, epoch=step / 41), control, told)
            decided.append((step, control.should_save))
            if told["SIGTERM"]:
                break
        return decided

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(run, range(3))
    assert others == [first] * 2
    (saved,) = (step for step, saves in first if saves)
    assert 5 <= saved <= 10 and 23 <= first[-1][0] <= 30  # at the log at the latest
    assert 3 <= all_gather.calls <= 20
