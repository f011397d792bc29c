"""A share of right answers, and how far chance may have moved it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ..errors import UserError

MOST_GROUPS = 200  # a column of more labels than this names rows rather than groups
_Z = NormalDist().inv_cdf(0.975)  # of an interval of 95 %


@dataclass(frozen=True)
class Proportion:
    """``value`` of ``count`` are right; chance leaves the true share between ``low`` and ``high``, 95 times of 100."""

    value: float
    low: float
    high: float
    count: int


def proportion(right: float, count: float) -> Proportion:
    """Return the share ``right / count`` with its interval of 95 %, by Wilson's score method.

    The formula is that of Wilson (1927), "Probable Inference, the Law of Succession, and Statistical Inference".
    ``right`` may have parts, where an answer is partly right: the interval is then a little too wide. So may
    ``count``, where some of a prompt's comparisons are counted, which together are one.
    """
    value = right / count
    middle = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * (value * (1 - value) / count + _Z**2 / (4 * count**2)) ** 0.5
    # at the ends rounding would leave the value itself out
    low, high = max(min(middle - half, value), 0.0), min(max(middle + half, value), 1.0)
    return Proportion(float(value), float(low), float(high), round(count))


def by_group(right_N: np.ndarray, groups_N: Sequence[str]) -> dict[str, Proportion]:
    """Return the share of each group, by its name, in the names' order.

    Args:
        right_N: How far each answer is right, 0 to 1.
        groups_N: The group of each.

    Raises:
        UserError: There are so many groups that the column must name rows.
    """
    check_groups(groups_N)
    names = {name: number for number, name in enumerate(sorted(set(groups_N)))}
    numbers_N = [names[label] for label in groups_N]  # numpy's texts would lose a null character at their end
    right, counts = np.bincount(numbers_N, right_N).tolist(), np.bincount(numbers_N).tolist()
    return {name: proportion(right[number], counts[number]) for name, number in names.items()}


def check_groups(groups_N: Sequence[str]) -> None:
    """Raise UserError if there are so many groups that the column must name rows."""
    if (count := len(set(groups_N))) > MOST_GROUPS:
        raise UserError(
            f"{count} groups are too many to compare, {MOST_GROUPS} are the most: does the column name rows, as "
            f"{groups_N[0]!r}? Choose one that groups them."
        )


def mean_of(groups: Mapping[str, Proportion]) -> float | None:
    """Return the mean over groups, each counting the same, whatever its size; None without groups."""
    return float(np.mean([each.value for each in groups.values()])) if groups else None


def label_of(value: Any) -> str:
    """Return the name of the group that a value puts its row into."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
