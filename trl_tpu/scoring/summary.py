"""Sums rewards up as rows go by: how many pairs are right, the range of each column, and what has no reward."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..evaluation.ranking import grades_beside_rewards, judge_rankings, parts_of, rankings_of
from ..evaluation.reward_sums import RewardSums, sums_of
from .forms import REASON

_OF_RANKINGS = ("top1_accuracy", "kendall_tau")


@dataclass
class Summary:
    """What a summary of scored rows is made from.

    Args:
        columns: The columns of rewards.
    """

    columns: tuple[str, ...]
    rows: int = 0
    pairs: RewardSums = field(default_factory=RewardSums)
    by_column: defaultdict[str, RewardSums] = field(default_factory=lambda: defaultdict(RewardSums))
    """The sums of each column, as if each of its rewards were a pair with itself."""
    ranked: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """The rewards and the grades of rows of answers with scores or ranks."""
    without: int = 0
    """Rows that lack a reward."""
    reason: str | None = None
    """Why the first of them does."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take scored rows into account."""
        self.rows += len(rows)
        for column in self.columns:
            rewards = [reward for row in rows for reward in _numbers(row.get(column))]
            self.by_column[column] += sums_of(np.array([rewards, rewards]).T)
        parts = [part for row in rows for part in parts_of(row)]
        both = [(part.get("reward_chosen"), part.get("reward_rejected")) for part in parts]
        pairs = [pair for pair in both if all(isinstance(reward, float) for reward in pair)]
        self.pairs += sums_of(np.array(pairs))
        for part in parts:
            if part[REASON] is None and (grades := grades_beside_rewards(part)):
                self.ranked.append((part["rewards"], grades))
        reasons = [row[REASON] for row in rows if row[REASON] is not None]
        self.without += len(reasons)
        self.reason = self.reason or next(iter(reasons), None)

    @property
    def has_rewards(self) -> bool:
        return any(sums.pairs for sums in self.by_column.values())

    def lines(self) -> Iterator[str]:
        """Yield accuracy and margin of pairs, and the range of each column."""
        if found := self.pairs.metrics():
            yield f"{'pairs' if 'reward_chosen' in self.columns else 'steps':<16} {self.pairs.pairs}"
            yield f"accuracy         {found['accuracy']:.4f}"
            yield f"ties             {self.pairs.ties}"
            yield f"mean margin      {found['margin']:.4f}"
        if any(len(set(grades)) > 1 for _, grades in self.ranked):
            verdict = judge_rankings(*rankings_of(*zip(*self.ranked, strict=True)))
            yield f"rankings         {len(self.ranked)}"
            yield from (f"{name:<16} {value:.4f}" for name, value in verdict.metrics().items() if name in _OF_RANKINGS)
        for column, sums in self.by_column.items():
            if found := sums.metrics():
                mean, least, largest = (found[f"{which}_reward"] for which in ("mean", "min", "max"))
                yield f"{column:<16} mean {mean:.4f}, min {least:.4f}, max {largest:.4f}"
        if not self.has_rewards:
            yield "no row was scored"

    def complaint(self) -> str | None:
        """Say how many rows lack a reward, and why the first of them does; None if none does."""
        if not self.without:
            return None
        return f"{self.without} of {self.rows} rows have no reward, or lack one; `{REASON}` says why: {self.reason}"


def _numbers(value: Any) -> list[float]:
    return [each for each in (value if isinstance(value, list) else [value]) if each is not None]
