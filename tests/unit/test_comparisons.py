"""Every loss and gradient equals its paper's formula in float64 and ignores rewards of padding."""

import math
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import softplus

from trl_tpu.data.collate import ComparisonRule, Labels, compare
from trl_tpu.data.kinds import Answers, Pairs, Rankings, Solutions
from trl_tpu.modeling.losses import Loss

K, A = 4, 3
PLAIN = ComparisonRule()
Ranking = list[tuple[Any, Any]]  # (reward, grade) of each answer
rewards = st.floats(-20, 20, width=32)
rankings = st.lists(st.lists(st.tuples(rewards, st.integers(0, 3)), min_size=2, max_size=K), min_size=1, max_size=4)
shares = st.floats(0, 1, width=32)


def losses(rows: Any, rewards_PAK: Any, loss: Loss, rule: ComparisonRule, attributes: int = 0) -> tuple[Any, ...]:
    """Return the weighted loss of each row, the gradients of their sum [P, A, K], and the divisor of the sum.

    The table has two padding rows, and rewards of padding are 7.5 or infinite.
    """
    answers = max(len(values_K) for values_AK in rewards_PAK for values_K in values_AK)
    kind = Solutions() if "labels" in rows[0] else Pairs() if "grades" not in rows[0] else Rankings()
    kind = Answers() if answers == 1 and kind == Rankings() else kind
    table = compare(Labels.of(rows, kind, answers, attributes), rule, len(rows) + 2).map_tensors(torch.from_numpy)
    padded = torch.full((len(rows) + 2, max(attributes, 1), answers), 7.5)
    padded[len(rows) :] = float("inf")
    for padded_AK, values_AK in zip(padded, rewards_PAK, strict=False):
        for padded_K, values_K in zip(padded_AK, values_AK, strict=True):
            padded_K[: len(values_K)] = torch.tensor(values_K)
    padded.requires_grad_()
    losses_P = loss.per_row(padded.transpose(1, 2).flatten(0, 1), table)
    (gradient_PAK,) = torch.autograd.grad(losses_P.sum(), padded)
    assert not losses_P[len(rows) :].any() and not gradient_PAK[len(rows) :].any()
    return losses_P[: len(rows)].tolist(), gradient_PAK[: len(rows)], table.weight_sum_1.item()


def assert_equal(
    rows: Any, rewards_PAK: Any, formula: Any, loss: Loss, rule: ComparisonRule = PLAIN, attributes: int = 0
) -> None:
    """Compare with a formula of a row's index and rewards [A][K], and with its gradients, in float64."""
    found, gradient_PAK, total = losses(rows, rewards_PAK, loss, rule, attributes)
    steps = sum(len(values_K) for (values_K,) in rewards_PAK) if "labels" in rows[0] else 0
    assert total == (steps or len(rows))
    for number, values_AK in enumerate(rewards_PAK):
        leaves = [torch.tensor(values_K, dtype=torch.float64, requires_grad=True) for values_K in values_AK]
        expected = formula(number, leaves) + 0.0 * sum(leaf.sum() for leaf in leaves)
        assert found[number] == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
        for slope_K, gradient_K in zip(torch.autograd.grad(expected, leaves), gradient_PAK[number], strict=True):
            assert gradient_K[: len(slope_K)].tolist() == pytest.approx(slope_K.tolist(), rel=1e-4, abs=1e-4)
            assert not gradient_K[len(slope_K) :].any()


def assert_rankings_equal(some: Any, formula: Any, loss: Loss, rule: ComparisonRule = PLAIN) -> None:
    grades = [[grade for _, grade in each] for each in some]
    rows, rewards_P1K = [{"grades": each} for each in grades], [[[reward for reward, _ in each]] for each in some]

    def of_row(number: int, rewards_1K: Any) -> Any:
        return formula(list(zip(rewards_1K[0], grades[number], strict=True)))

    assert_equal(rows, rewards_P1K, of_row, loss, rule)


def mean(values: list[Any]) -> Any:
    return sum(values) / max(1, len(values))


# ---- pairs and steps


def cross_entropy(target: float, difference: torch.Tensor) -> torch.Tensor:
    return target * softplus(-difference) + (1 - target) * softplus(difference)


@given(st.lists(st.tuples(rewards, rewards, st.floats(-5, 5, width=32), shares), min_size=1, max_size=5))
def test_pair_loss_is_the_cross_entropy_of_its_probability_with_a_margin(some: Any) -> None:
    def formula(number: int, rewards_AK: Any) -> torch.Tensor:
        ((chosen, rejected),), (_, _, margin, share) = rewards_AK, some[number]
        target = share + 0.1 * (1 - 2 * share)
        return cross_entropy(target, chosen - rejected - margin) + 0.5 * (chosen + rejected) ** 2

    rows = [{"margin": margin, "chosen_probability": share} for _, _, margin, share in some]
    loss = Loss(label_smoothing=0.1, center_rewards_coefficient=0.5)
    assert_equal(rows, [[pair[:2]] for pair in some], formula, loss)


def test_large_differences_neither_overflow_nor_vanish() -> None:
    found, *_ = losses([{}, {}], [[[1000.0, -1000.0]], [[-1000.0, 1000.0]]], Loss(), PLAIN)
    assert found == [0.0, 2000.0]


@given(st.lists(st.lists(st.tuples(rewards, shares), max_size=K), min_size=1, max_size=4).filter(any))
def test_each_step_is_compared_with_zero_and_counts_once(some: list[Ranking]) -> None:
    def formula(number: int, rewards_1K: Any) -> Any:
        labels = [label for _, label in some[number]]
        return sum(map(cross_entropy, labels, rewards_1K[0]))

    rows = [{"labels": [label for _, label in each]} for each in some]
    assert_equal(rows, [[[reward for reward, _ in each]] for each in some], formula, Loss())


# ---- rankings


def instruct_gpt(each: Ranking, scale: float = 0, smoothing: float = 0, center: float = 0) -> Any:
    """https://arxiv.org/abs/2203.02155, eq. 1, with Llama 2's margins: the mean over the comparisons of a prompt."""
    compared = [(r, s, a - b) for (r, a), (s, b) in permutations(each, 2) if a > b]
    return mean([cross_entropy(1 - smoothing, r - s - scale * by) + center * (r + s) ** 2 for r, s, by in compared])


def plackett_luce(each: Ranking, top_k: int) -> Any:
    """Sum the losses of drawing the best of the remaining answers by the softmax of their rewards."""
    left, total = sorted(each, key=lambda one: -one[1]), 0.0
    for _ in range(min(top_k, len(left))):
        total += torch.stack([reward for reward, _ in left]).logsumexp(0) - left[0][0]
        left = left[1:]
    return total


def with_ties(each: Ranking, model: str, threshold: float) -> Any:
    """Rao and Kupper 1967, theta = exp(threshold), or Davidson 1970, nu = threshold; strengths are exp(reward)."""
    likely = []
    for (r, a), (s, b) in combinations(each, 2):
        one, other = (x.exp() for x in ((r, s) if a >= b else (s, r)))
        if model == "davidson":
            tied = threshold * (one * other).sqrt()
            likely.append((tied if a == b else one) / (one + other + tied))
        else:
            theta = math.exp(threshold)
            product = (theta**2 - 1) * one * other / ((one + theta * other) * (theta * one + other))
            likely.append(product if a == b else one / (one + theta * other))
    return mean([-each.log() for each in likely])


def regression(each: Ranking, center: float = 0) -> Any:
    compared = [(r + s) ** 2 for (r, a), (s, b) in permutations(each, 2) if a > b]
    return mean([(r - g) ** 2 for r, g in each]) + center * mean(compared)


@given(rankings, st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.01]))
def test_ranking_loss_is_the_mean_over_comparisons(some: Any, scale: float, smoothing: float, center: float) -> None:
    loss = Loss(label_smoothing=smoothing, center_rewards_coefficient=center or None)
    rule = ComparisonRule(margin_scale=scale or None)
    assert_rankings_equal(some, lambda each: instruct_gpt(each, scale, smoothing, center), loss, rule)


@given(rankings, st.sampled_from([None, 1, 2]))
def test_plackett_luce_loss_equals_its_formula(some: Any, top_k: int | None) -> None:
    ordered = [[(reward, -place) for place, (reward, _) in enumerate(each)] for each in some]
    loss = Loss(loss_type="plackett_luce", ranking_top_k=top_k)
    assert_rankings_equal(ordered, lambda each: plackett_luce(each, top_k or K), loss)


@given(rankings, st.sampled_from(["davidson", "rao_kupper"]), st.sampled_from([0.3, 1.0]))
def test_tie_losses_equal_their_formulas(some: Any, model: str, threshold: float) -> None:
    loss = Loss(ties=model, tie_threshold=threshold)
    rule = ComparisonRule(learns_ties=True)
    assert_rankings_equal(some, lambda each: with_ties(each, model, threshold), loss, rule)


@given(rankings, st.sampled_from([0.0, 0.1]))
def test_regression_loss_fits_rewards_to_grades(some: Any, center: float) -> None:
    loss = Loss(loss_type="regression", center_rewards_coefficient=center or None)
    assert_rankings_equal(some, lambda each: regression(each, center), loss)


def test_plackett_luce_ignores_answers_of_equal_grade() -> None:
    loss = Loss(loss_type="plackett_luce")
    assert_rankings_equal([[(0.3, 1), (2.0, 0), (-1.0, 0)]], lambda each: plackett_luce(each, 1), loss)


@pytest.mark.parametrize("ties", ["skip", "davidson"])
def test_comparisons_can_be_weighted_equally(ties: str) -> None:
    some: list[Ranking] = [[(0.5, 2), (-1.0, 1), (2.0, 2)], [(1.0, 0), (0.0, 1)]]
    rows = [{"grades": [grade for _, grade in each]} for each in some]
    rule = ComparisonRule(learns_ties=ties != "skip", counts_comparisons=True)
    found, _, total = losses(rows, [[[reward for reward, _ in each]] for each in some], Loss(ties=ties), rule)
    values = [[(torch.tensor(reward, dtype=torch.float64), grade) for reward, grade in each] for each in some]
    means = [instruct_gpt(each) if ties == "skip" else with_ties(each, ties, 1.0) for each in values]
    counts = (2, 1) if ties == "skip" else (3, 1)
    assert total == sum(counts)
    assert found == pytest.approx([count * each.item() for count, each in zip(counts, means, strict=True)], rel=1e-5)


# ---- attributes

grades = st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=K, max_size=K))


@given(
    st.lists(st.lists(grades, min_size=A, max_size=A).filter(any), min_size=1, max_size=3),
    st.sampled_from([None, [2.0, 0.5, 1.0]]),
    st.sampled_from(["sigmoid", "regression"]),
    st.integers(0, 9),
)
def test_attribute_loss_is_a_weighted_mean(some: Any, weights: Any, loss_type: str, seed: int) -> None:
    def formula(number: int, rewards_AK: Any) -> Any:
        graded = [place for place in range(A) if some[number][place] is not None]
        each = [list(zip(rewards_AK[place], some[number][place], strict=True)) for place in graded]
        of_one: Any = instruct_gpt if loss_type == "sigmoid" else regression
        shares = [(weights or [1.0] * A)[at] for at in graded]
        return sum(share * of_one(ranking) for share, ranking in zip(shares, each, strict=True)) / sum(shares)

    rewards_PAK = np.random.default_rng(seed).normal(size=(len(some), A, K)).tolist()
    rule, rows = ComparisonRule(attribute_weights=weights), [{"grades": each} for each in some]
    assert_equal(rows, rewards_PAK, formula, Loss(loss_type=loss_type), rule, A)
