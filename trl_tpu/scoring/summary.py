"""Sums rewards up as rows go by: how many pairs are right, the range of each column, and what has no reward."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .forms import REASON

_NAMED = 5  # rows without rewards that are named


@dataclass
class Range:
    """The count, mean, least and largest of some numbers."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    largest: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least, self.largest = min(self.least, value), max(self.largest, value)

    def __str__(self) -> str:
        return f"mean {self.total / self.count:.4f}, min {self.least:.4f}, max {self.largest:.4f}"


@dataclass
class Summary:
    """What a summary of scored rows is made from.

    Args:
        columns: The columns of rewards.
    """

    columns: tuple[str, ...]
    rows: int = 0
    ranges: dict[str, Range] = field(default_factory=dict)
    margins: Range = field(default_factory=Range)
    right: int = 0
    ties: int = 0
    without: int = 0
    """Rows that lack a reward."""
    reasons: list[str] = field(default_factory=list)
    """Of the first rows that do."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a scored row into account."""
        self.rows += 1
        for column in self.columns:
            for reward in _numbers(row.get(column)):
                self.ranges.setdefault(column, Range()).add(reward)
        chosen, rejected = row.get("reward_chosen"), row.get("reward_rejected")
        if isinstance(chosen, float) and isinstance(rejected, float):
            self.margins.add(chosen - rejected)
            self.right += chosen > rejected
            self.ties += chosen == rejected
        if row[REASON] is not None:
            self.without += 1
            if len(self.reasons) < _NAMED:
                self.reasons.append(row[REASON])

    @property
    def has_rewards(self) -> bool:
        return bool(self.ranges)

    def lines(self) -> Iterator[str]:
        """Yield accuracy and margin of pairs, and the range of each column."""
        if pairs := self.margins.count:
            yield f"pairs            {pairs}"
            yield f"accuracy         {self.right / pairs:.4f}"
            yield f"ties             {self.ties}"
            yield f"mean margin      {self.margins.total / pairs:.4f}"
        for column, values in self.ranges.items():
            yield f"{column:<16} {values}"
        if not self.has_rewards:
            yield "no row was scored"

    def complaint(self) -> str | None:
        """Say how many rows lack a reward, and why the first of them do; None if none does."""
        if not self.without:
            return None
        more = "" if self.without == len(self.reasons) else "\n  ..."
        listed = "".join(f"\n  {reason}" for reason in self.reasons)
        return f"{self.without} of {self.rows} rows have no reward, or lack one; `{REASON}` says why:{listed}{more}"


def _numbers(value: Any) -> list[float]:
    return [each for each in (value if isinstance(value, list) else [value]) if each is not None]
