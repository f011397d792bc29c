"""Logged reward metrics equal numpy over all real pairs of all processes, also after a resume."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_hosts import AllGather
from hypothesis import example, given
from hypothesis import strategies as st

from trl_tpu.config.reward_config import REWARD_METRICS
from trl_tpu.data.collate import ComparisonRule, Labels, compare, pairs_of
from trl_tpu.data.kinds import Pairs, Rankings
from trl_tpu.evaluation.evaluate import RewardSums, sums_on_host
from trl_tpu.runtime.native import Runtime
from trl_tpu.training import statistics
from trl_tpu.training.statistics import StepStatistics, scale_of

Row = tuple[float, float, bool]  # chosen, rejected, is real

CPU = torch.device("cpu")
# multiples of 1/4 sum exactly in float32, so any difference is a bug
reward = st.integers(-40, 40).map(lambda number: number / 4)
ONE_PAIR = compare(pairs_of(1), ComparisonRule()).map_tensors(torch.from_numpy)
pairs = st.lists(st.tuples(reward, reward, st.booleans()), min_size=1, max_size=6)
batches = st.lists(pairs, min_size=1, max_size=4)


def new_metrics(index: int = 0, count: int = 1, **settings: Any) -> StepStatistics:
    """Return the statistics of one process among several that accelerate counts."""
    accelerator: Any = SimpleNamespace(process_index=index, num_processes=count)
    return StepStatistics(Runtime(), CPU, accelerator, **settings)


def close_log(*processes: StepStatistics) -> dict[str, float]:
    """Return the metrics that the first process logs for all processes."""
    all_gather = AllGather(len(processes))

    def log(index: int) -> dict[str, float]:
        return processes[index].close(torch.zeros(1), None, 0.0, 1, 1)[0]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(processes)) as pool:
        patch.setattr(statistics, "over_processes", lambda own, value: all_gather.gather(own.process_index, value))
        logs, *_ = pool.map(log, range(len(processes)))
    return {name: value for name, value in logs.items() if name in ("num_tokens", *REWARD_METRICS)}


def update(metrics: StepStatistics, *batches: list[Row], tokens: int = 5, labels: Any = None) -> StepStatistics:
    """Add pairs with this number of tokens per answer; padding pairs go into a second micro-batch."""
    for rows in batches:
        here_P = np.array([row[2] for row in rows])
        kind = Rankings() if labels and "grades" in labels[0] else Pairs()
        table = compare(Labels.of(labels or [{}] * len(rows), kind, 2), ComparisonRule()).among(here_P)
        tokens_S = torch.tensor(here_P.repeat(2) * tokens, dtype=torch.int32)
        rewards_SA = torch.tensor([row[:2] for row in rows]).reshape(-1, 1)
        metrics.update(rewards_SA, tokens_S, table.map_tensors(torch.from_numpy))
    return metrics


def host_sums(rewards_P2: Any) -> RewardSums:
    rewards_PAK = torch.as_tensor(rewards_P2).reshape(-1, 1, 2)
    return sums_on_host(rewards_PAK, pairs_of(len(rewards_PAK)))


def resumed(*parts: StepStatistics, index: int = 0, count: int = 1) -> StepStatistics:
    metrics = new_metrics(index, count)
    metrics.start(1, json.loads(json.dumps([part.state(torch.zeros(1))[0] for part in parts])))
    return metrics


def by_numpy(rows: list[Row]) -> dict[str, float]:
    real = np.array([row[:2] for row in rows if row[2]])
    if not len(real):
        return {}
    chosen, rejected = real.T
    found = {"min_reward": real.min(), "mean_reward": real.mean(), "max_reward": real.max()}
    found |= {"margin": np.mean(chosen - rejected), "tie_rate": np.mean(chosen == rejected)}
    return found | {"accuracy": np.mean(chosen > rejected)}


@given(batches, batches)
def test_metrics_cover_all_pairs_of_all_processes(given: list[list[Row]], others: list[list[Row]]) -> None:
    first, second = update(new_metrics(0, 2), *given), update(new_metrics(1, 2), *others)
    every = [row for rows in given + others for row in rows]
    tokens = {"num_tokens": 10 * sum(row[2] for row in every)} if any(row[2] for row in every) else {}
    assert close_log(first, second) == pytest.approx(tokens | by_numpy(every))
    assert close_log(first, second) == tokens  # closing resets the sums: nothing is counted twice


@given(batches, batches, st.integers(1, 3))
def test_resumed_run_logs_equal_metrics(given: list[list[Row]], others: list[list[Row]], count: int) -> None:
    logged = [(1.0, 0.0, True)]  # before the checkpoint
    whole, parts = update(new_metrics(), logged * 2), [update(new_metrics(index, 2), logged) for index in range(2)]
    close_log(whole)
    close_log(*parts)
    update(whole, *given, *others)
    for metrics, own in zip(parts, (given, others), strict=True):
        update(metrics, *own)
    logs = close_log(*(resumed(*parts, index=index, count=count) for index in range(count)))
    assert logs == close_log(whole)


@given(batches)
def test_reward_scale_covers_all_real_pairs_on_device_and_host(given: list[list[Row]]) -> None:
    metrics, logged, on_host = new_metrics(), new_metrics(), RewardSums()
    for rows in given:
        update(metrics, rows)
        update(logged, rows)
        close_log(logged)
        on_host = on_host + host_sums([row[:2] for row in rows if row[2]])
    on_device = metrics.read()
    on_host.tokens = on_device.tokens
    assert vars(on_host) == pytest.approx(vars(on_device), rel=1e-6, abs=1e-4)
    real = np.array([row[:2] for rows in given for row in rows if row[2]])
    scale = logged.scale
    if not len(real) or not real.std() > 0:
        assert scale is None
        return
    assert scale is not None and scale.rewards == real.size
    assert (scale.mean, scale.std) == pytest.approx((real.mean(), real.std()), rel=1e-5)


def test_reward_scale_comes_from_an_evaluation_or_the_last_pairs() -> None:
    metrics = new_metrics()
    for level in (100.0, 0.0, 1.0):
        update(metrics, [(level, level + 1, True)] * 300)
        close_log(metrics)
    assert metrics.scale is not None
    assert metrics.scale.rewards == 1200 and metrics.scale.mean == 1.0  # the last two logs hold 512 pairs together
    evaluated = RewardSums(answers=2, reward=2.0, deviations=2.0, lowest=0.0, highest=2.0)
    metrics.evaluated = scale_of(evaluated, "the evaluation set")
    assert (metrics.scale.mean, metrics.scale.std) == (1.0, 1.0)
    for sums in (RewardSums(), host_sums(torch.ones(3, 2)), host_sums([[1.0, np.inf]])):
        assert scale_of(sums, "what cannot be divided by") is None


@given(st.lists(st.integers(0, 2**30), max_size=12), st.integers(0, 12))
@example([2**30] * 3, 1)
def test_token_counts_are_exact_beyond_int32_and_after_a_resume(counts: list[int], saved_at: int) -> None:
    metrics = new_metrics()
    for index, tokens in enumerate(counts):
        if index == saved_at:
            metrics = resumed(metrics)
        metrics.update(torch.zeros(2, 1), torch.tensor([tokens, 0], dtype=torch.int32), ONE_PAIR)
    assert close_log(metrics).get("num_tokens", 0) == sum(counts)


def test_standard_deviation_is_exact_far_from_zero() -> None:
    metrics, chooser = new_metrics(), np.random.default_rng(0)
    rewards_BP2 = (100 + 0.01 * chooser.standard_normal((20, 8, 2))).astype(np.float32)
    update(metrics, *([(*pair, True) for pair in rewards_P2] for rewards_P2 in rewards_BP2.tolist()))
    close_log(metrics)
    on_host_too = scale_of(host_sums(rewards_BP2), "rewards")
    assert metrics.scale is not None and on_host_too is not None
    assert metrics.scale.std == pytest.approx(rewards_BP2.std(dtype=np.float64), rel=0.01)
    assert on_host_too.std == pytest.approx(rewards_BP2.std(dtype=np.float64), rel=1e-9)


def test_metric_sums_of_older_checkpoints_are_read() -> None:
    """They counted correct comparisons and summed squares about 0. The oldest ones counted only pairs."""
    older = {"pairs": 2, "correct": 1, "ties": 1, "tokens": 7, "reward": 6.0, "margin": 2.0, "squares": 14.0}
    older |= {"lowest": 0.0, "highest": 3.0}
    metrics = new_metrics()
    steps = {"taken": 0, "nonfinite": 0, "in_a_row": 0, "reached_at": 0}
    metrics.start(1, [{"metrics": {"num_tokens": 10, "open": older}, "open_loss": 0.0, "nonfinite": steps}])
    update(metrics, [(3.0, 0.0, True), (0.0, 3.0, True)])
    logs = close_log(metrics)
    assert (logs["accuracy"], logs["tie_rate"], logs["margin"], logs["num_tokens"]) == (0.5, 0.25, 0.5, 37)
    assert metrics.scale is not None
    assert metrics.scale.std == pytest.approx(((14 + 18) / 8 - (12 / 8) ** 2) ** 0.5)


def test_more_probable_answer_counts_as_better() -> None:
    for probability, accuracy in ((0.9, 0.0), (0.1, 1.0)):
        labels = [{"chosen_probability": each} for each in (probability, 0.5)]
        logs = close_log(update(new_metrics(), [(0.0, 1.0, True), (5.0, 0.0, True)], labels=labels))
        assert (logs["accuracy"], logs["margin"], logs["mean_reward"]) == (accuracy, 2 * accuracy - 1, 1.5)
    metrics = update(new_metrics(), [(1.0, 2.0, True)], labels=[{"grades": [1.0, 1.0]}])
    assert close_log(metrics) == {"num_tokens": 10, "min_reward": 1.0, "mean_reward": 1.5, "max_reward": 2.0}


@pytest.mark.filterwarnings("error")
def test_nonfinite_rewards_are_logged_unless_steps_are_skipped() -> None:
    rows = [(float("nan"), 1.0, True), (2.0, 1.0, True)]
    kept, skipped = (update(new_metrics(nonfinite_limit=limit), rows) for limit in (0, 3))
    logs = close_log(kept)
    assert all(np.isnan(logs[name]) for name in ("mean_reward", "margin", "min_reward", "max_reward"))
    assert logs["accuracy"] == 0.5
    assert close_log(skipped) == {"num_tokens": 20} | by_numpy(rows[1:])
