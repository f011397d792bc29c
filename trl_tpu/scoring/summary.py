"""Running sums over scored rows: accuracy of pairs and rankings, ranges of columns, and rows without a reward."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..data.comparisons import Labels
from ..evaluation.ranking import grades_beside_rewards, parts_of, rankings_of, top1_of
from ..evaluation.reward_sums import RewardSums, pairs_of, sums_on_host
from .forms import REASON


@dataclass
class Summary:
    """Sums over scored rows, so that memory does not grow with their number.

    Args:
        columns: The columns of rewards.
    """

    columns: tuple[str, ...]
    rows: int = 0
    pairs: RewardSums = field(default_factory=RewardSums)
    by_column: defaultdict[str, RewardSums] = field(default_factory=lambda: defaultdict(RewardSums))
    """The sums of each column, as if each of its rewards were a pair with itself."""
    rankings: RewardSums = field(default_factory=RewardSums)
    """The sums of rows of answers with scores or ranks."""
    top1: float = 0.0
    """The sum of `top1_of` over those that have any comparison."""
    without: int = 0
    """Rows that lack a reward."""
    reason: str | None = None
    """Why the first of them does."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take scored rows into account."""
        self.rows += len(rows)
        for column in self.columns:
            rewards = [reward for row in rows for reward in _numbers(row.get(column))]
            self.by_column[column] += _sums_of([(reward, reward) for reward in rewards])
        parts = [part for row in rows for part in parts_of(row)]
        both = [(part.get("reward_chosen"), part.get("reward_rejected")) for part in parts]
        self.pairs += _sums_of([pair for pair in both if all(isinstance(reward, float) for reward in pair)])
        ranked = [
            (part["rewards"], grades)
            for part in parts
            if part[REASON] is None and (grades := grades_beside_rewards(part))
        ]
        if ranked:
            rewards_NK, grade_NK = rankings_of(*zip(*ranked, strict=True))
            labels = Labels(grade_NK[:, None].astype(np.float32), None, are_rankings=True)
            self.rankings += sums_on_host(torch.from_numpy(rewards_NK)[:, None], labels)
            self.top1 += top1_of(rewards_NK, grade_NK)[[len(set(grades)) > 1 for _, grades in ranked]].sum().item()
        reasons = [row[REASON] for row in rows if row[REASON] is not None]
        self.without += len(reasons)
        self.reason = self.reason or next(iter(reasons), None)

    @property
    def has_rewards(self) -> bool:
        return any(sums.pairs for sums in self.by_column.values())

    def lines(self) -> Iterator[str]:
        """Yield accuracy and margin of pairs, those of rankings, and the range of each column."""
        if found := self.pairs.metrics():
            yield f"{'pairs' if 'reward_chosen' in self.columns else 'steps':<16} {self.pairs.pairs}"
            yield f"accuracy         {found['accuracy']:.4f}"
            yield f"ties             {self.pairs.ties:.0f}"
            yield f"mean margin      {found['margin']:.4f}"
        if compared := self.rankings.comparisons:
            yield f"rankings         {self.rankings.pairs}"
            accuracy, tie_rate = (self.rankings.metrics()[name] for name in ("accuracy", "tie_rate"))
            yield f"accuracy         {accuracy:.4f}"
            yield f"top1_accuracy    {self.top1 / compared:.4f}"
            yield f"kendall_tau      {2 * accuracy + tie_rate - 1:.4f}"
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


def _sums_of(pairs: list[tuple[Any, Any]]) -> RewardSums:
    return sums_on_host(torch.tensor(pairs, dtype=torch.float64).reshape(-1, 1, 2), pairs_of(len(pairs)))


def _numbers(value: Any) -> list[float]:
    return [each for each in (value if isinstance(value, list) else [value]) if each is not None]
