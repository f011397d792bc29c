"""Several hosts do the same at the same step."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from accelerate import Accelerator
from meeting import Meeting
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from trl_tpu.training import stopping as agreement
from trl_tpu.training.components import check_alike
from trl_tpu.training.stopping import HostAgreement

# ---- decisions: hosts are threads, which meet as processes do


Asks = Callable[[int, int, TrainerControl], bool]
"""Of a host and a step: sets what a callback asks for there, and returns whether a SIGTERM has come."""


def agreement_of(meeting: Meeting, index: int) -> HostAgreement:
    agreed = HostAgreement(meeting.of(index), create_autospec(Accelerator, instance=True, num_processes=1))
    agreed.start(0)
    return agreed


def decide_together(hosts: int, steps: int, asks: Asks, args: TrainingArguments) -> tuple[list[list[Any]], Meeting]:
    """What each host decides at the end of each step; all take the same steps, or this would not end."""
    meeting = Meeting(hosts)

    def run(index: int) -> list[Any]:
        agreed = agreement_of(meeting, index)
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


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", logging_steps=10, save_strategy="no", max_steps=40
    )


def test_what_one_host_asks_for_all_do_at_the_same_step(arguments: TrainingArguments) -> None:
    def asks(host: int, step: int, control: TrainerControl) -> bool:
        control.should_save |= host == 1 and step == 5
        return host == 0 and step >= 23

    decided, _ = decide_together(3, 40, asks, arguments)
    assert all(of_host == decided[0] for of_host in decided)
    (saved,) = (step for step, saves, *_ in decided[0] if saves)
    assert 5 <= saved <= 10  # at the log at the latest
    last, *_, requests = decided[0][-1]
    assert 23 <= last <= 30 and requests == {"SIGTERM": True}
    assert [step for step, _, logs, *_ in decided[0] if logs] == [step for step in (10, 20, 30) if step <= last]


def test_hosts_do_not_meet_at_every_step(arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is due: after the first step, in as many as take some seconds on the slowest host."""
    clock = itertools.count()
    monkeypatch.setattr(agreement.time, "monotonic", lambda: next(clock) * 0.01)
    _, meeting = decide_together(2, 40, lambda *_: False, arguments)
    assert 4 <= meeting.times <= 20  # the logs at 10, 20, 30 and 40 among them


def test_requests_of_one_host_between_steps_and_after_a_save_become_all_hosts(arguments: TrainingArguments) -> None:
    """Between micro-batches the loop would break on this host alone; after a save all know that they have saved."""
    meeting = Meeting(2)

    def run(index: int) -> list[bool]:
        agreed = agreement_of(meeting, index)
        between, control = TrainerControl(should_training_stop=index == 1, should_save=True), TrainerControl()
        agreed.postpone(between)
        state = TrainerState(global_step=1, epoch=0.1, max_steps=40)
        told = agreed.decide(arguments, state, control, {"SIGTERM": index == 1})["SIGTERM"]
        stops = control.should_training_stop
        control.should_training_stop = index == 0  # as a callback may ask for it after a save
        agreed.decide(arguments, state, control, {}, now=True)
        return [between.should_training_stop, told, stops, control.should_training_stop]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[False, True, True, True]] * 2


def test_one_process_decides_at_once(arguments: TrainingArguments) -> None:
    decided, meeting = decide_together(1, 7, lambda host, step, control: step == 3, arguments)
    assert [step for step, *_ in decided[0]] == [1, 2, 3] and meeting.times == 0


def test_hosts_of_different_runs_are_refused_by_what_differs() -> None:
    run = {"seed": 42, "train data": "10 pairs (00)", "the step to resume from": 3}
    check_alike([run] * 16)
    with pytest.raises(ValueError, match="seed is 42 on hosts 0, 1, 3 and 43 on host 2") as error:
        check_alike([run, run, run | {"seed": 43}, run | {"the step to resume from": None}])
    assert "resume from is 3 on hosts 0, 1, 2 and null on host 3" in str(error.value)
    assert "train data" not in str(error.value)
