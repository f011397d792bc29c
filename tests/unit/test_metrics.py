"""What is logged equals a numpy computation over all real pairs; the recompile guard warns neither early nor late."""

import json
import logging
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trl_tpu.evaluation.reward_sums import RewardSums, sums_of
from trl_tpu.runtime.native import Runtime
from trl_tpu.training.metrics import RewardMetrics, on_host, scale_of
from trl_tpu.training.recompile_guard import RecompileGuard

CPU = torch.device("cpu")
# quarters: sums are exact in float32, so any difference is a fault
reward = st.integers(-40, 40).map(lambda number: number / 4)
batches = st.lists(
    st.lists(st.tuples(reward, reward, st.booleans()), min_size=1, max_size=6), min_size=1, max_size=4
)  # (chosen, rejected, is real) of each pair of each batch


def new_metrics() -> RewardMetrics:
    return RewardMetrics(Runtime(), CPU)


def close(metrics: RewardMetrics) -> dict[str, float]:
    return metrics.close(on_host(Runtime().fetch(metrics.device_sums)))


def update(metrics: RewardMetrics, rows: list[tuple[float, float, bool]], tokens: int = 10) -> None:
    table = torch.tensor([row[:2] for row in rows])
    mask = torch.tensor([row[2] for row in rows])
    metrics.update(table, None if mask.all() else mask, torch.tensor(tokens, dtype=torch.int32))


def by_numpy(rows: list[tuple[float, float, bool]]) -> dict[str, float]:
    real = np.array([row[:2] for row in rows if row[2]])
    if not len(real):
        return {}
    chosen, rejected = real.T
    return {
        "min_reward": real.min(),
        "mean_reward": real.mean(),
        "max_reward": real.max(),
        "accuracy": np.mean(chosen > rejected),
        "margin": np.mean(chosen - rejected),
        "tie_rate": np.mean(chosen == rejected),
    }


@given(batches)
def test_the_scale_of_rewards_is_over_all_real_pairs(given: list[list[tuple[float, float, bool]]]) -> None:
    metrics = new_metrics()
    for rows in given:  # a log after each
        update(metrics, rows)
        close(metrics)
    real = np.array([row[:2] for rows in given for row in rows if row[2]])
    if not real.std() > 0:
        assert metrics.scale is None
        return
    scale = metrics.scale
    assert scale is not None and scale.rewards == real.size and "training" in scale.of
    assert (scale.mean, scale.std) == pytest.approx((real.mean(), real.std()), rel=1e-12)  # sums are exact


def test_the_scale_is_of_the_last_pairs_and_of_an_evaluation_where_there_was_one() -> None:
    metrics = new_metrics()
    for level in (100.0, 0.0, 1.0):
        update(metrics, [(level, level + 1, True)] * 300)
        close(metrics)
    assert metrics.scale is not None
    assert metrics.scale.rewards == 1200 and metrics.scale.mean == 1.0  # the last two have 512 pairs together
    metrics.evaluated = scale_of(RewardSums(pairs=1, reward=2.0, squares=4.0), "the evaluation set")
    assert (metrics.scale.mean, metrics.scale.std) == (1.0, 1.0)
    metrics.forget_scale()
    assert metrics.scale is None


@pytest.mark.parametrize("sums", [RewardSums(), sums_of(np.ones((3, 2))), sums_of(np.array([[1.0, np.inf]]))])
def test_what_cannot_be_divided_by_is_no_scale(sums: RewardSums) -> None:
    assert scale_of(sums, "nothing") is None


@given(batches)
def test_metrics_are_over_all_real_pairs_of_all_batches(given: list[list[tuple[float, float, bool]]]) -> None:
    metrics = new_metrics()
    for rows in given:
        update(metrics, rows)
    logged = close(metrics)
    assert logged.pop("num_tokens") == 10 * len(given)
    assert logged == pytest.approx(by_numpy([row for rows in given for row in rows]))
    assert close(metrics) == {"num_tokens": 10 * len(given)}  # closed: nothing is counted twice


def test_averages_are_weighted_by_pairs_and_extremes_are_true() -> None:
    metrics = new_metrics()
    update(metrics, [(5.0, 1.0, True), (4.0, 2.0, True), (3.0, 3.0, True)])
    update(metrics, [(-2.0, 6.0, True), (100.0, -100.0, False)])
    logged = close(metrics)
    assert logged["accuracy"] == pytest.approx(2 / 4)  # a mean of the batches' means would say 1/3
    assert logged["margin"] == pytest.approx((4 + 2 + 0 - 8) / 4)
    assert logged["tie_rate"] == pytest.approx(1 / 4)
    assert (logged["min_reward"], logged["max_reward"]) == (-2.0, 6.0)


@given(batches, batches)
def test_the_state_goes_through_json_and_a_resumed_run_logs_the_same(
    before: list[list[tuple[float, float, bool]]], after: list[list[tuple[float, float, bool]]]
) -> None:
    whole, first = new_metrics(), new_metrics()
    for metrics in (whole, first):
        update(metrics, [(1.0, 0.0, True)], tokens=7)
        close(metrics)  # what is logged before the checkpoint
    for rows in before:
        update(whole, rows)
        update(first, rows)
    resumed = new_metrics()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for rows in after:
        update(whole, rows)
        update(resumed, rows)
    assert close(resumed) == close(whole)
    update(whole, [(1.0, 0.0, True)])
    update(resumed, [(1.0, 0.0, True)])
    assert close(resumed) == close(whole)


def test_many_batches_lose_no_token_and_no_precision_that_shows() -> None:
    metrics, chooser = new_metrics(), np.random.default_rng(0)
    table = chooser.normal(size=(500, 8, 2)).astype(np.float32)
    for rewards in table:
        metrics.update(torch.from_numpy(rewards), None, torch.tensor(123_457, dtype=torch.int32))
    logged = close(metrics)
    assert logged["num_tokens"] == 500 * 123_457  # float32 would not hold it
    assert logged["margin"] == pytest.approx((table[..., 0] - table[..., 1]).mean(dtype=np.float64), abs=1e-6)


@given(st.lists(st.integers(0, 2**30), max_size=12), st.integers(0, 12))
@example([2**30] * 3, 1)
def test_tokens_between_two_logs_are_exact_beyond_int32_and_over_a_resume(counts: list[int], saved_at: int) -> None:
    metrics = new_metrics()
    for index, tokens in enumerate(counts):
        if index == saved_at:
            state = json.loads(json.dumps(metrics.state_dict()))
            metrics = new_metrics()
            metrics.load_state_dict(state)
        update(metrics, [(1.0, 0.0, True)], tokens)
    assert close(metrics)["num_tokens"] == sum(counts)


@given(batches)
def test_sums_of_host_rewards_and_their_addition_equal_the_device_sums(
    given: list[list[tuple[float, float, bool]]],
) -> None:
    metrics, added = new_metrics(), RewardSums()
    for rows in given:
        update(metrics, rows, tokens=3)
        added = added + sums_of(np.array([row[:2] for row in rows if row[2]], np.float32).reshape(-1, 2))
    on_device = on_host(metrics.device_sums)
    added.tokens = on_device.tokens
    assert added == on_device
    assert added.metrics() == pytest.approx(by_numpy([row for rows in given for row in rows]))


# ---- the recompile guard


class CountingRuntime(Runtime):
    """Plain torch, and a number of compiled programs that the test sets."""

    compiled = 0

    def compile_count(self) -> int:
        return self.compiled


BATCH = {"input_ids": torch.zeros(4, 2, 64), "attention_mask": torch.zeros(4, 2, 64), "name": "no tensor"}


def run(guard: RecompileGuard, runtime: CountingRuntime, compiles: int, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Steps that compile once each; at which of them the guard warned, counted from 1."""
    warned = []
    for step in range(1, compiles + 1):
        caplog.clear()
        guard.see(BATCH)
        runtime.compiled += 1
        guard.check()
        warned += [step] * len(caplog.records)
    return warned


@pytest.mark.parametrize(
    ("planned", "shared", "first"),
    [(None, 0, 2), (1, 0, 2), (3, 0, 4), (3, 1, 5)],
)
def test_the_guard_warns_at_1_2_4_8_programs_too_many(
    planned: int | None, shared: int, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = CountingRuntime()
    runtime.compiled = 100  # what was compiled before training does not count
    guard = RecompileGuard(runtime, planned, shared)
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        assert run(guard, runtime, first + 9, caplog) == [first, first + 1, first + 3, first + 7]


def test_the_guard_is_silent_when_nothing_compiles_and_about_what_others_compile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = CountingRuntime()
    guard = RecompileGuard(runtime, planned_shapes=2)
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        assert run(guard, runtime, 2, caplog) == []
        for _ in range(10):
            guard.pause()
            runtime.compiled += 50  # an evaluation, say
            guard.resume()
            guard.check()
        assert caplog.records == []
        assert run(guard, runtime, 1, caplog) == [1]


def test_the_warning_names_the_shapes_the_plan_and_the_fix(caplog: pytest.LogCaptureFixture) -> None:
    runtime = CountingRuntime()
    guard = RecompileGuard(runtime, planned_shapes=1)
    guard.see(BATCH)
    guard.see(BATCH)
    guard.see({"input_ids": torch.zeros(4, 2, 77)})
    runtime.compiled += 2
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        guard.check()
    assert "compiled 2 times, 1 more than planned" in caplog.text
    assert "(planned: 1): input_ids [4, 2, 64], attention_mask [4, 2, 64] (2 times)" in caplog.text
    assert "input_ids [4, 2, 77] (1 times)" in caplog.text
    assert "pad_to_multiple_of" in caplog.text


def test_numbers_that_are_not_finite_are_logged_and_not_hidden() -> None:
    metrics = new_metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(metrics, [(float("nan"), 1.0, True), (2.0, 1.0, True)])
        logged: dict[str, Any] = close(metrics)
    assert np.isnan(logged["mean_reward"]) and np.isnan(logged["margin"])
    assert np.isnan(logged["min_reward"]) and np.isnan(logged["max_reward"])
    assert logged["accuracy"] == 0.5


def test_the_guard_announces_each_program_once_until_it_has_run() -> None:
    said: list[str] = []
    guard = RecompileGuard(CountingRuntime(), planned_shapes=3, announce=said.append)
    other = {"input_ids": torch.zeros(4, 2, 77)}
    guard.see(BATCH, updates=False)
    guard.see(BATCH, updates=False)
    guard.see(BATCH)  # another program
    guard.see(other)
    guard.settle()
    guard.settle()
    guard.see(BATCH)
    assert said == ["compiling shape 1 of 3", "", "compiling shape 2 of 3", "", "compiling shape 3 of 3", ""]
    guard = RecompileGuard(CountingRuntime(), planned_shapes=None, announce=said.append)
    guard.see(BATCH)
    assert said[-1] == "compiling shape 1"
    del said[:]
    guard.see_evaluated(BATCH)  # another program
    guard.see_evaluated(BATCH)
    guard.see_evaluated(other)
    guard.settle()
    guard.see_evaluated(other)
    assert said == ["", "compiling shape 1 for evaluation", "", "compiling shape 2 for evaluation", ""]
