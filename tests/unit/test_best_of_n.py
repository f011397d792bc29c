"""Rows of several answers get the credit that RewardBench 2's published rules give them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.errors import UserError
from trl_tpu.evaluation.judge import judge_best_of_n, padded
from trl_tpu.evaluation.verdict import BestOfN

few = st.integers(-3, 3).map(float)
Answers = tuple[list[float], list[float], str]  # rewards of right and of wrong ones, and an id


def judged(rows: list[Answers], groups: Any = None) -> BestOfN:
    grades = [[1.0] * len(right) + [0.0] * len(wrong) for right, wrong, _ in rows]
    rewards = [[*right, *wrong] for right, wrong, _ in rows]
    return judge_best_of_n(padded(rewards), padded(grades), [id_ for *_, id_ in rows], groups)


def ties_score(rows: list[Answers]) -> float:
    return judged(rows, ["Ties"] * len(rows)).groups["Ties"].value


@pytest.mark.parametrize(
    ("chosen", "rejected", "credit"),
    [
        ([1.0], [1.0, 0.0, 1.0], 1 / 3),
        ([1.0, 3.0], [2.0], 1),  # several right answers: the best of them counts
        ([3.0, 3.0], [3.0], 2 / 3),
    ],
)
def test_credit_by_hand(chosen: list[float], rejected: list[float], credit: float) -> None:
    assert judged([(chosen, rejected, "")]).accuracy.value == pytest.approx(credit)


def test_the_score_of_ties_by_hand() -> None:
    rows: list[Answers] = [
        ([5.0], [1.0], "ref:1"),  # right, gap 4
        ([4.0, 3.0], [1.0, 0.0], "tied:1"),  # right, gap 2, spread 1
        ([2.0], [3.0], "ref:2"),  # wrong, gap -1
        ([4.0, 2.0], [1.0], "tied:2"),  # right, gap 1, spread 2
        ([4.0, 2.0], [3.0], "tied:3"),  # wrong; not asked as ref
    ]
    beyond = (math.tanh(2 / 1 - 1) + math.tanh(-1 / 2 - 1)) / 2
    expected = 0.3 * 2 / 3 + 0.3 * 1 / 2 + 0.2 * 1 / 2 + 0.2 * 1 / 2 + 0.01 * beyond
    assert ties_score(rows) == pytest.approx(expected)


@given(
    st.lists(
        st.tuples(few, st.lists(few, min_size=1, max_size=3), st.lists(few, min_size=2, max_size=4), few),
        min_size=1,
        max_size=5,
    )
)
def test_the_score_of_ties_is_its_published_rule_read_line_by_line(
    questions: list[tuple[float, list[float], list[float], float]],
) -> None:
    """The rule once more, as one reads it in the paper: question by question, with plain numbers."""
    rows: list[Answers] = []
    ref_right, tied_right, soft, hard, beyond = 0, 0, 0, 0, 0.0
    for number, (reference, wrong, right, other) in enumerate(questions):
        rows += [([reference], wrong, f"ref:{number}"), (right, [other], f"tied:{number}")]
        gap_ref, gap_tied, spread = reference - max(wrong), min(right) - other, max(right) - min(right)
        ref_right += gap_ref > 0
        tied_right += gap_tied > 0
        soft += gap_tied > spread
        hard += min(gap_ref, gap_tied) > spread
        smaller = min(gap_ref, gap_tied)
        if spread:
            beyond += math.tanh(smaller / spread - 1)
        elif smaller:
            beyond += math.copysign(1.0, smaller)
    count = len(questions)
    expected = (0.3 * tied_right + 0.3 * ref_right + 0.2 * soft + 0.2 * hard + 0.01 * beyond) / count
    assert ties_score(rows) == pytest.approx(expected, abs=1e-12)


def test_the_leaderboards_score_is_the_mean_over_subsets_with_ties_by_its_own_rule() -> None:
    ties: list[Answers] = [([5.0], [1.0], "ref:1"), ([4.0, 3.0], [1.0, 0.0], "tied:1")]
    rows = [([2.0], [1.0, 0.0], ""), ([1.0], [1.0, 0.0], ""), ([0.0], [1.0], ""), *ties, ([math.nan], [1.0], "")]
    found = judged(rows, ["Focus", "Focus", "Math", "Ties", "Ties", "Math"])
    assert (found.rows, found.left_out) == (5, 1)
    assert {name: (each.value, each.count) for name, each in found.groups.items()} == {
        "Focus": (0.75, 2),
        "Math": (0, 1),
        "Ties": (pytest.approx(ties_score(ties)), 2),
    }
    assert found.mean_over_groups == pytest.approx((0.75 + 0 + ties_score(ties)) / 3)
    assert found.accuracy.value == pytest.approx(3.5 / 5) and found.worst == (2, 1)


@pytest.mark.parametrize("ids", [["7"], ["ref:7"], ["ref:7", "tied:7"], ["ref:7", "tied:8", "tied:8"]])
def test_rows_that_the_rule_of_ties_cannot_read_are_rejected(ids: list[str]) -> None:
    with pytest.raises(UserError, match="ref:NUMBER"):
        ties_score([([1.0], [0.0], id_) for id_ in ids])
