"""Rows of several answers get the credit that RewardBench 2's published rules give them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.errors import UserError
from trl_tpu.evaluation.judge import Answers, judge_best_of_n, ties_score

few = st.integers(-3, 3).map(float)


@pytest.mark.parametrize(
    ("chosen", "rejected", "credit"),
    [
        ([1.0], [1.0, 0.0, 1.0], 1 / 3),
        ([1.0, 3.0], [2.0], 1),  # several right answers: the best of them counts
        ([3.0, 3.0], [3.0], 2 / 3),
    ],
)
def test_credit_by_hand(chosen: list[float], rejected: list[float], credit: float) -> None:
    assert Answers(chosen, rejected).credit == pytest.approx(credit)


def test_the_score_of_ties_by_hand() -> None:
    rows = [
        Answers([5.0], [1.0], "ref:1"),  # right, gap 4
        Answers([4.0, 3.0], [1.0, 0.0], "tied:1"),  # right, gap 2, spread 1
        Answers([2.0], [3.0], "ref:2"),  # wrong, gap -1
        Answers([4.0, 2.0], [1.0], "tied:2"),  # right, gap 1, spread 2
        Answers([4.0, 2.0], [3.0], "tied:3"),  # wrong; not asked as ref
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
    rows, ref_right, tied_right, soft, hard, beyond = [], 0, 0, 0, 0, 0.0
    for number, (reference, wrong, right, other) in enumerate(questions):
        rows += [Answers([reference], wrong, f"ref:{number}"), Answers(right, [other], f"tied:{number}")]
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
    ties = [Answers([5.0], [1.0], "ref:1"), Answers([4.0, 3.0], [1.0, 0.0], "tied:1")]
    rows = [Answers([2.0], [1.0, 0.0]), Answers([1.0], [1.0, 0.0]), Answers([0.0], [1.0]), *ties]
    rows.append(Answers([math.nan], [1.0]))
    found = judge_best_of_n(rows, ["Focus", "Focus", "Math", "Ties", "Ties", "Math"])
    assert (found.rows, found.left_out) == (5, 1)
    assert {name: (each.value, each.count) for name, each in found.groups.items()} == {
        "Focus": (0.75, 2),
        "Math": (0, 1),
        "Ties": (pytest.approx(ties_score(ties)), 2),
    }
    assert found.mean_over_groups == pytest.approx((0.75 + 0 + ties_score(ties)) / 3)
    assert found.accuracy.value == pytest.approx(3.5 / 5) and found.worst == (2, 1)


@pytest.mark.parametrize(
    "rows",
    [
        [Answers([1.0], [0.0], "7")],
        [Answers([1.0], [0.0], "ref:7")],
        [Answers([1.0], [0.0], "ref:7"), Answers([1.0], [0.0], "tied:7")],
        [Answers([1.0], [0.0], "ref:7"), *[Answers([1.0, 2.0], [0.0], "tied:7")] * 2],
    ],
)
def test_rows_that_the_rule_of_ties_cannot_read_are_named(rows: list[Answers]) -> None:
    with pytest.raises(UserError, match="needs an `id` of each row, once: `ref:NUMBER`, or `tied:NUMBER`"):
        judge_best_of_n(rows, ["Ties"] * len(rows))
