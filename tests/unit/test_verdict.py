"""The verdict's numbers, worked out by hand, by brute force, and by other libraries."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import binomtest

from trl_tpu.evaluation.reward_sums import distribution_of, proportion
from trl_tpu.evaluation.verdict import calibration_of, judge_pairs, length_bias_of
from trl_tpu.report.tables import sentences_of

margins = st.lists(st.floats(-40, 40) | st.just(0.0), min_size=1, max_size=60).map(np.array)


@given(st.integers(1, 500).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_the_interval_is_scipys(case: tuple[int, int]) -> None:
    expected = binomtest(*case).proportion_ci(0.95, method="wilson")
    ours = proportion(*case)
    assert (ours.low, ours.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= ours.low <= ours.value <= ours.high <= 1


def test_a_verdict_worked_out_by_hand() -> None:
    log3 = math.log(3)  # sigmoid of it is 3/4
    pairs = [(log3, 0), (0, log3), (1, 1), (2 + log3, 2), (math.nan, 0), (0, math.inf)]
    found = judge_pairs(np.array(pairs), groups=["a", "b\0", "b\0", "a", "c", "a"])
    assert (found.pairs, found.left_out, found.ties) == (4, 2, 1)
    assert (found.accuracy.value, found.accuracy.count) == (0.5, 4)
    assert (found.accuracy.low, found.accuracy.high) == pytest.approx((0.15004, 0.84996), abs=1e-5)
    assert found.loss == pytest.approx((2 * math.log(4 / 3) + math.log(4) + math.log(2)) / 4)
    # three picks with confidence 3/4, of which two are right; a tie with 1/2, half right
    assert found.calibration.ece == pytest.approx(3 / 4 * (3 / 4 - 2 / 3))
    assert [(each.count, each.accuracy) for each in found.calibration.bins] == [(1, 0.5), (3, pytest.approx(2 / 3))]
    assert found.calibration.brier == pytest.approx((2 * (1 / 4) ** 2 + (3 / 4) ** 2 + (1 / 2) ** 2) / 4)
    assert {name: (each.value, each.count) for name, each in found.groups.items()} == {"a": (1, 2), "b\0": (0, 2)}
    assert found.mean_over_groups == 0.5
    assert found.worst == (1, 2)
    assert found.margins.mean == pytest.approx(log3 / 4) and found.margins.quantiles["0.5"] == pytest.approx(log3 / 2)


def test_rewards_by_the_model_that_the_loss_assumes_are_calibrated_and_wider_ones_are_not() -> None:
    chooser = np.random.default_rng(0)
    true_N = chooser.normal(0, 2, 20_000)
    margins_N = np.where(chooser.random(20_000) < 1 / (1 + np.exp(-true_N)), true_N, -true_N)
    assert calibration_of(margins_N).ece < 0.015
    assert calibration_of(3 * margins_N).ece > 0.08


@given(margins)
@example(np.array([-1.999999999999993, 0, 0, 0, 0]))
@example(np.array([5e-324]))
def test_a_histogram_has_every_margin_once_and_an_edge_at_zero(margins_N: np.ndarray) -> None:
    found = distribution_of(margins_N)
    assert sum(found.counts) == len(margins_N) and len(found.edges) == len(found.counts) + 1 <= 42
    # numbers too small to be told apart are in one bin with zero, and so are tiny negative ones at the first edge
    if margins_N.min() < -1e-9 and margins_N.max() > 1e-9:
        zero = int(np.argmin(np.abs(found.edges)))
        assert found.edges[zero] == 0 and sum(found.counts[:zero]) == int((margins_N < 0).sum())


def test_length_alone_is_judged_beside_the_model() -> None:
    # chosen longer: by 1, 2, 3, 10; shorter: by 4, 5; once equal
    longer = [1, 2, 3, 10, -4, -5, 0]
    right = [1, 1, 1, 0, 0, 1, 1]
    rewards_N2 = np.array([[each, 0.5] for each in right], dtype=float)
    lengths_N2 = np.array([[20 + each, 20] for each in longer])
    found = length_bias_of(rewards_N2, lengths_N2)
    assert found.longer_wins == pytest.approx(4.5 / 7) and found.length_only == pytest.approx(4.5 / 7)
    assert found.chosen_is_longer is not None and found.rejected_is_longer is not None
    assert (found.chosen_is_longer.value, found.rejected_is_longer.value) == (3 / 4, 1 / 2)
    assert found.controlled == pytest.approx((3 / 4 + 1 / 2) / 2)
    shown = [(each.shortest, each.longest, each.accuracy.value, each.accuracy.count) for each in found.bins]
    assert shown[:3] == [(-5, -5, 1, 1), (-4, -4, 0, 1), (0, 0, 1, 1)]
    assert shown[3:] == [(1, 2, 1, 2), (3, 3, 1, 1), (10, 10, 0, 1)]


def test_lengths_that_are_all_the_same_say_nothing() -> None:
    found = length_bias_of(np.array([[1.0, 0.0], [0.0, 1.0]]), np.full((2, 2), 7))
    assert (found.longer_wins, found.length_only, found.controlled) == (0.5, 0.5, None)
    assert [each.accuracy.count for each in found.bins] == [2]


def test_the_numbers_to_log_leave_out_what_is_not_known() -> None:
    rewards_N2 = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert set(judge_pairs(rewards_N2).metrics()) == {"accuracy_low", "accuracy_high", "ece", "brier"}
    logged = judge_pairs(rewards_N2, np.array([[2, 1], [3, 4]]), groups=["x y", "z"]).metrics()
    assert logged["accuracy/x y"] == 1 and logged["accuracy/z"] == 0 and logged["mean_accuracy_over_groups"] == 0.5
    assert logged["length_only_accuracy"] == 0.5 and logged["length_controlled_accuracy"] == 0.5


@pytest.mark.parametrize(
    ("margin", "longer", "said"),
    [
        ([6.0] * 90 + [-6.0] * 10, [1, -1] * 50, ["90.0% (82.6% to 94.5% at 95 %) of 100 pairs"]),
        ([2.0] * 88 + [-2.0] * 12, [1] * 88 + [-1] * 12, ["88.0%; the model is not clearly above", "favors longer"]),
        ([0.1, -0.1] * 20, [1, -1, -1, 1] * 10, ["cannot be told from chance", "expected calibration error"]),
        ([0.1] * 8 + [-0.1] * 32, [1, -1] * 20, ["worse than chance: see whether chosen and rejected are exchanged"]),
    ],
)
def test_words_say_what_the_numbers_do(margin: list[float], longer: list[int], said: list[str]) -> None:
    margins_N = np.array(margin)
    lengths_N2 = np.stack([10 + np.array(longer), np.full(len(longer), 10)], axis=-1)
    words = " ".join(sentences_of(judge_pairs(np.stack([margins_N, 0 * margins_N], axis=-1), lengths_N2)))
    assert [each for each in said if each not in words] == []
