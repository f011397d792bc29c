"""Sums over compared rewards, from which accuracy, margin, ties, mean and extremes follow.

Training adds them up on the device in float32 (`training.metrics`), evaluation and scoring on the host in float64, by
the same code. The comparisons of one ranking (of each attribute, where there are several) together count once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.judgements import Comparisons, answers_there, weighted

COUNTS = ("pairs", "comparisons", "answers")
SUMS = ("correct", "ties", "margin", "reward", "deviations")
_AT_ONCE = 2**20  # comparisons on the host, which bounds its memory


@dataclass
class RewardSums:
    """Sums over pairs, rankings or steps, on the host.

    Attributes:
        pairs: Pairs, or prompts of rankings or steps.
        comparisons: Pairs, rankings or steps that have any comparison.
        correct, ties, margin: Sums of each one's mean over its comparisons.
        reward: Sum of all answers' rewards.
        deviations: Squared deviations of rewards from their mean, summed: a sum of squares about 0 would cancel.
    """

    pairs: int = 0
    comparisons: int = 0
    answers: int = 0
    tokens: int = 0
    correct: float = 0.0
    ties: float = 0.0
    margin: float = 0.0
    reward: float = 0.0
    deviations: float = 0.0
    lowest: float = float("inf")
    highest: float = float("-inf")

    @classmethod
    def read(
        cls, counts: torch.Tensor, sums: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor
    ) -> "RewardSums":
        """Read what `sums_of` returned, on the host."""
        named = zip((*COUNTS, *SUMS), [*counts.tolist(), *sums.tolist()], strict=True)
        return cls(**dict(named), lowest=lowest.item(), highest=highest.item())

    def __add__(self, other: "RewardSums") -> "RewardSums":
        """Return the sums over both sets of pairs."""
        added = {name: getattr(self, name) + getattr(other, name) for name in (*COUNTS, "tokens", *SUMS)}
        added["deviations"] += between(self.answers, self.reward, other.answers, other.reward)
        # numpy's keep NaN, which Python's leave out where it comes second
        lowest, highest = np.minimum(self.lowest, other.lowest), np.maximum(self.highest, other.highest)
        return RewardSums(**added, lowest=float(lowest), highest=float(highest))

    def metrics(self) -> dict[str, float]:
        """Return means: strict accuracy (chosen > rejected), margin, ties, rewards; extremes of rewards."""
        mean = self.reward / max(self.answers, 1)
        rewards = {"min_reward": self.lowest, "mean_reward": mean, "max_reward": self.highest}
        sums = {"accuracy": self.correct, "margin": self.margin, "tie_rate": self.ties} if self.comparisons else {}
        return (rewards if self.answers else {}) | {name: each / self.comparisons for name, each in sums.items()}


def between(answers: Any, reward: Any, other_answers: Any, other_reward: Any) -> Any:
    """Return what the squared deviations of two sets gain when they are taken from the mean of both.

    By Chan, Golub and LeVeque (1979, "Updating formulae and a pairwise algorithm for computing sample variances").
    """
    apart = reward / (answers + (answers == 0)) - other_reward / (other_answers + (other_answers == 0))
    every = answers + other_answers
    return apart**2 * (answers / (every + (every == 0))) * other_answers


def sums_of(
    rewards_PK: torch.Tensor, mask_P: torch.Tensor, labels: Mapping[str, torch.Tensor], weights: Sequence[float]
) -> list[torch.Tensor]:
    """Return `COUNTS`, `SUMS`, and the lowest and highest reward [1], over the rows that ``mask_P`` keeps.

    Args:
        weights: Of several attributes, whose weighted sums are the rewards.
    """
    compared = Comparisons.of(rewards_PK, mask_P, labels)
    rewards_PK = weighted(rewards_PK, weights)
    mask_PK = mask_P[:, None] & answers_there(labels.get("is_there", torch.ones_like(rewards_PK, dtype=torch.bool)))

    def total(values_PK: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_PK, values_PK, 0.0).sum(-1).sum()

    counts = torch.stack([each.sum(dtype=torch.int32) for each in (mask_P, compared.are_there.any(-1), mask_PK)])
    reward = total(rewards_PK)
    deviations = total((rewards_PK - reward / counts[2].clamp(min=1)).square())
    lowest = torch.where(mask_PK, rewards_PK, float("inf")).min()
    highest = torch.where(mask_PK, rewards_PK, float("-inf")).max()
    return [
        counts,
        torch.stack([*(each.sum() for each in compared.means), reward, deviations]),
        lowest[None],
        highest[None],
    ]


def slices(rows: int, comparisons: int) -> list[slice]:
    """Divide rows into parts with so many comparisons that memory is bounded, given the most that a row has."""
    count = max(1, _AT_ONCE // max(1, comparisons))
    return [slice(start, start + count) for start in range(0, rows, count)]


def sums_on_host(
    rewards_NK: torch.Tensor,
    labels: Mapping[str, torch.Tensor] | None = None,
    weights: Sequence[float] = (),
    mask_N: torch.Tensor | None = None,
) -> RewardSums:
    """Return the sums over host rewards of pairs, chosen first, or with labels of rankings or steps, in float64."""
    mask_N = torch.ones(len(rewards_NK), dtype=torch.bool) if mask_N is None else mask_N
    result = RewardSums()
    for part in slices(len(rewards_NK), rewards_NK.shape[1:].numel() * rewards_NK.shape[-1]):
        some = {name: values[part] for name, values in (labels or {}).items()}
        result += RewardSums.read(*sums_of(rewards_NK[part].double(), mask_N[part], some, weights))
    return result
