"""Sums over compared rewards, and the statistics of proportions and distributions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from ..data.comparisons import ComparisonRule, Comparisons, Labels, compare, compared_rewards
from ..errors import UserError

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


QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BINS = 40


@dataclass(frozen=True)
class Distribution:
    """Moments, quantiles and a histogram.

    Attributes:
        quantiles: By the share of the numbers below, such as ``"0.05"``.
        edges: Of the histogram's B bins, B + 1.
        counts: Weight of the numbers in each bin, by default their count; the last bin has its upper edge, too.
    """

    mean: float
    std: float
    lowest: float
    highest: float
    quantiles: dict[str, float]
    edges: tuple[float, ...]
    counts: tuple[float, ...]


def is_finite(rewards: np.ndarray) -> np.ndarray:
    """Tell which rewards are finite in float32, as a model gives them; sums of larger numbers would overflow."""
    within: np.ndarray = np.abs(rewards) <= np.finfo(np.float32).max
    return within


def distribution_of(values_N: np.ndarray, weights_N: np.ndarray | None = None) -> Distribution:
    """Return the distribution of finite numbers, [N] with N > 0, which count by their weights.

    The histogram's bins are of equal width on either side of 0, so that no bin of margins has right and wrong ones.
    """
    most = largest if (largest := float(np.abs(values_N).max())) > 1e-300 else 1.0  # bins need a width
    counts, edges = np.histogram(values_N, bins=_BINS, range=(-most, most), weights=weights_N)
    mean = np.average(values_N, weights=weights_N)
    order_N = np.argsort(values_N)
    sorted_N = np.ones(len(values_N)) if weights_N is None else weights_N[order_N]
    below_N = np.cumsum(sorted_N) - sorted_N  # with equal weights, numpy's linear quantiles
    quantiles = np.interp(np.array(QUANTILES) * below_N[-1], below_N, values_N[order_N])
    return Distribution(
        mean=float(mean),
        std=float(np.average((values_N - mean) ** 2, weights=weights_N) ** 0.5),
        lowest=float(values_N.min()),
        highest=float(values_N.max()),
        quantiles=dict(zip(map(str, QUANTILES), quantiles.tolist(), strict=True)),
        edges=tuple(map(float, edges)),
        counts=tuple(counts.tolist()),
    )
