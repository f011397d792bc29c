"""Rows of several answers, some of them right: does the best reward go to a right one?

The rules are RewardBench 2's (Malik et al. 2025, https://arxiv.org/abs/2506.01937), as its code has them:
`reroll_and_score_dataset` and `process_single_model` in `rewardbench/utils.py` of https://github.com/allenai/reward-bench.
Its leaderboard's score is the mean over its subsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from .distribution import is_finite
from .proportion import Proportion, by_group, mean_of, proportion

TIES = "ties"  # the name of RewardBench 2's subset of its own rule, in whatever case


@dataclass(frozen=True)
class Answers:
    """The rewards of one row's answers.

    Attributes:
        chosen: Of the right answers, one or more.
        rejected: Of the wrong ones, one or more.
        id: In RewardBench 2's subset Ties ``ref:NUMBER`` or ``tied:NUMBER``.
    """

    chosen: Sequence[float]
    rejected: Sequence[float]
    id: str = ""

    @property
    def credit(self) -> float:
        """The share of right answers among those with the highest reward.

        With one right answer among k that are highest this is RewardBench 2's 1/k, and 0 if it is none of them.
        """
        highest = max(*self.chosen, *self.rejected)
        right, wrong = (sum(reward == highest for reward in rewards) for rewards in (self.chosen, self.rejected))
        return right / (right + wrong)

    @property
    def is_finite(self) -> bool:
        return bool(is_finite(np.array([*self.chosen, *self.rejected])).all())


@dataclass(frozen=True)
class BestOfN:
    """How often the best of several answers is a right one.

    Attributes:
        rows: With finite rewards; `left_out` had others.
        accuracy: Mean credit over all rows, those of a subset Ties among them.
        groups: Of each subset: mean credit, but of Ties its own score, which has no interval (nan).
        mean_over_groups: RewardBench 2's score, where the groups are its subsets.
        worst: Indices of rows, those first whose best wrong answer is the most above their best right one.
    """

    rows: int
    left_out: int
    accuracy: Proportion
    groups: dict[str, Proportion]
    mean_over_groups: float | None
    worst: tuple[int, ...]


def judge_best_of_n(rows: Sequence[Answers], groups: Sequence[str] | None = None, worst: int = 10) -> BestOfN:
    """Judge rows of several answers.

    Args:
        groups: The subset of each row.
        worst: How many of the rows that went most wrong to name, at most.

    Raises:
        UserError: No row has finite rewards only, or the rows of a subset Ties are not as its rule needs them.
    """
    kept = [index for index, row in enumerate(rows) if row.is_finite]
    if not kept:
        raise UserError(f"None of {len(rows)} rows has finite rewards for all of its answers, so nothing can be said.")
    credit_N = np.array([rows[index].credit for index in kept])
    scores = {} if groups is None else by_group(credit_N, [groups[index] for index in kept])
    for name in scores:
        if groups is not None and name.lower() == TIES:
            ties = [rows[index] for index in kept if groups[index] == name]
            scores[name] = Proportion(ties_score(ties), float("nan"), float("nan"), len(ties))
    gap_N = np.array([max(rows[index].chosen) - max(rows[index].rejected) for index in kept])
    worst_first = [kept[number] for number in np.argsort(gap_N, kind="stable") if gap_N[number] <= 0]
    return BestOfN(
        rows=len(kept),
        left_out=len(rows) - len(kept),
        accuracy=proportion(float(credit_N.sum()), len(kept)),
        groups=scores,
        mean_over_groups=mean_of(scores),
        worst=tuple(worst_first[:worst]),
    )


def ties_score(rows: Sequence[Answers]) -> float:
    """Return RewardBench 2's score of its subset Ties, whose questions have several right answers.

    Every question is asked twice: as ``tied:NUMBER`` with several right answers, and as ``ref:NUMBER`` with one. A row
    is right if all its right answers are above all wrong ones; ``gap`` is by how much, ``spread`` how far the right
    ones are from each other. The score is

        0.3 * share of tied rows that are right + 0.3 * share of ref rows that are right
        + 0.2 * share of questions with gap of tied > spread + 0.2 * with the smaller gap of tied and ref > spread
        + 0.01 * mean of tanh(smaller gap / spread - 1), where 0 / 0 is 0

    Raises:
        UserError: An id of another form, a tied row with one right answer, or no question that is asked both ways.
    """
    by_id = {row.id: row for row in rows}
    gaps = {id_: min(row.chosen) - max(row.rejected) for id_, row in by_id.items()}
    tied, ref = ({id_ for id_ in by_id if id_.startswith(kind)} for kind in ("tied:", "ref:"))
    both_ways = sorted(id_ for id_ in tied if id_.replace("tied", "ref", 1) in ref)
    is_alone = any(len(by_id[id_].chosen) < 2 for id_ in both_ways)
    if len(tied) + len(ref) < len(rows) or not both_ways or is_alone:
        raise UserError(
            "RewardBench 2's rule for its subset Ties needs an `id` of each row, once: `ref:NUMBER`, or `tied:NUMBER` "
            "with two right answers or more, and questions that are asked both ways. Give whole questions with such "
            "ids, or the subset another name."
        )
    spread_Q = np.array([np.ptp(by_id[id_].chosen) for id_ in both_ways])
    tied_Q = np.array([gaps[id_] for id_ in both_ways])
    smaller_Q = np.minimum(tied_Q, [gaps[id_.replace("tied", "ref", 1)] for id_ in both_ways])
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond_Q = np.nan_to_num(np.tanh(smaller_Q / spread_Q - 1), nan=0.0)
    right_shares = [np.mean([gaps[id_] > 0 for id_ in kind]) for kind in (tied, ref)]
    above_spread = [np.mean(gap_Q > spread_Q) for gap_Q in (tied_Q, smaller_Q)]
    return float(0.3 * sum(right_shares) + 0.2 * sum(above_spread) + 0.01 * np.mean(beyond_Q))
