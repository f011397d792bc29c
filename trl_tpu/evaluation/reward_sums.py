"""Sums over compared rewards, from which accuracy, margin, ties, mean and extremes follow.

Training adds them up on the device in float32 (`training.metrics`), evaluation and scoring on the host in float64, by
the same code. The comparisons of one ranking (of each attribute, where there are several) together count once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.comparisons import ComparisonRule, Comparisons, Labels, compare, compared_rewards

COUNTS = ("pairs", "comparisons", "answers")
SUMS = ("correct", "ties", "margin", "reward", "deviations")
_AT_ONCE = 2**19  # comparisons on the host, which bounds its memory


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
        """Return means: strict accuracy (better > worse), margin, ties, rewards; extremes of rewards."""
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
    rewards_SA: torch.Tensor, is_there_S: torch.Tensor, table: Comparisons[torch.Tensor], weights: Sequence[float] = ()
) -> list[torch.Tensor]:
    """Return `COUNTS`, `SUMS`, and the lowest and highest reward [1], over the rewards that ``is_there_S`` keeps.

    Args:
        weights: Of several attributes, whose weighted sums are the rewards.
    """
    is_there_P = is_there_S.unflatten(0, (-1, table.answers)).any(-1)
    order_G4 = order_of(rewards_SA, table, is_there_P)
    by_attribute = zip(weights or (1.0,), rewards_SA.unbind(-1), strict=True)
    reward_S: Any = sum(weight * values_S for weight, values_S in by_attribute)

    def total(value_S: torch.Tensor) -> torch.Tensor:
        return torch.where(is_there_S, value_S, 0.0).sum()

    has_any_G = order_G4[:, 3] > 0
    counts = torch.stack([each.sum(dtype=torch.int32) for each in (is_there_P, has_any_G, is_there_S)])
    reward = total(reward_S)
    deviations = total((reward_S - reward / counts[2].clamp(min=1)).square())
    lowest = torch.where(is_there_S, reward_S, float("inf")).min()
    highest = torch.where(is_there_S, reward_S, float("-inf")).max()
    return [counts, torch.stack([*order_G4[:, :3].sum(0), reward, deviations]), lowest[None], highest[None]]


def order_of(rewards_SA: torch.Tensor, table: Comparisons[torch.Tensor], is_there_P: torch.Tensor) -> torch.Tensor:
    """Return four numbers of each ranking, or of each step, [G, 4].

    They are the shares of right comparisons and of ties, the mean margin, and the number of comparisons. A comparison
    with probability 0.5 does not count.
    """
    better_C, worse_C = compared_rewards(rewards_SA, table)
    rankings = len(better_C) if table.has_baseline else len(table.ranking_weight_G)
    is_there_C = is_there_P[:, None].expand(-1, len(better_C) // len(is_there_P)).flatten()
    decided_GM = ((table.weight_C > 0) & (table.probability_C > 0.5) & is_there_C).unflatten(0, (rankings, -1))
    values = (better_C > worse_C, better_C == worse_C, better_C - worse_C)
    by_ranking = [torch.where(decided_GM, each.to(better_C.dtype).view(decided_GM.shape), 0.0) for each in values]
    count_G = decided_GM.sum(-1)
    return torch.stack([*(each.sum(-1) / count_G.clamp(min=1) for each in by_ranking), count_G], dim=-1)


def tables_on_host(labels: Labels) -> Iterator[tuple[slice, Comparisons[torch.Tensor]]]:
    """Yield parts of the rows, and their tables: of so many comparisons that memory is bounded."""
    rows, attributes, answers = labels.grade_PAK.shape
    count = max(1, _AT_ONCE // (attributes * answers**2))
    for start in range(0, rows, count):
        part = slice(start, start + count)
        some = Labels(labels.grade_PAK[part], None, labels.are_rankings, labels.has_baseline)
        yield part, compare(some, ComparisonRule()).map_tensors(torch.from_numpy)


def sums_on_host(rewards_NAK: torch.Tensor, labels: Labels, weights: Sequence[float] = ()) -> RewardSums:
    """Return the sums over host rewards of rows with these labels, in float64."""
    result = RewardSums()
    for part, table in tables_on_host(labels):
        rewards_SA = rewards_NAK[part].double().transpose(1, 2).flatten(0, 1)
        is_there_S = ~table.grade_SA.isnan().all(-1)
        result += RewardSums.read(*sums_of(rewards_SA, is_there_S, table, weights))
    return result


def pairs_of(count: int) -> Labels:
    """Return the labels of pairs, chosen first."""
    return Labels(np.tile(np.array([1.0, 0.0], np.float32), (count, 1, 1)))
