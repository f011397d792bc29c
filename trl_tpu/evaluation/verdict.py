"""Numbers of a verdict on a reward model: accuracy with its interval, calibration, length bias, best of N."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ..errors import UserError

MOST_GROUPS = 200  # a column of more labels than this names rows rather than groups
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_HISTOGRAM_BINS = 40
_CONFIDENCE_BINS = 10
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


def distribution_of(values_N: np.ndarray, weights_N: np.ndarray) -> Distribution:
    """Return the weighted distribution of finite numbers, [N] with N > 0.

    The histogram's bins are of equal width on either side of 0, so that no bin of margins has right and wrong ones.
    """
    most = largest if (largest := float(np.abs(values_N).max())) > 1e-300 else 1.0  # bins need a width
    counts, edges = np.histogram(values_N, bins=_HISTOGRAM_BINS, range=(-most, most), weights=weights_N)
    mean = np.average(values_N, weights=weights_N)
    order_N = np.argsort(values_N)
    sorted_N = weights_N[order_N]
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


@dataclass(frozen=True)
class ConfidenceBin:
    """The ``count`` pairs with a confidence from ``low`` up to ``high``: their mean, and the share of right picks."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Distance of confidence from accuracy, over all pairs and by confidence.

    Attributes:
        ece: Expected calibration error: the mean over pairs of ``|accuracy - confidence|`` of their bin (Guo et al.
            2017, "On Calibration of Modern Neural Networks", eq. 3), with ten bins of equal width over [1/2, 1]. A
            tie, in whose pair the model picks either answer, is half right.
        brier: The mean of ``(1 - sigmoid(margin))**2``: half the score of Brier (1950), who adds up the same number
            for either answer. 0.25 is no knowledge.
        bins: Of the reliability curve; those without pairs are left out.
    """

    ece: float
    brier: float
    bins: tuple[ConfidenceBin, ...]


def _sigmoid(values_N: np.ndarray) -> np.ndarray:
    result_N: np.ndarray = np.exp(-np.logaddexp(0.0, -values_N))  # overflows for no value
    return result_N


def calibration_of(margins_N: np.ndarray, weights_N: np.ndarray) -> Calibration:
    """Return the weighted calibration of finite margins, chosen less rejected reward, [N] with N > 0."""
    confidence_N = _sigmoid(np.abs(margins_N))
    right_N = (np.sign(margins_N) + 1) / 2
    edges = np.linspace(0.5, 1.0, _CONFIDENCE_BINS + 1)
    bin_N = np.clip(np.digitize(confidence_N, edges) - 1, 0, _CONFIDENCE_BINS - 1)  # the last has its upper edge, too
    bins, ece = [], 0.0
    for number in np.unique(bin_N):
        in_bin_N = bin_N == number
        weight = weights_N[in_bin_N].sum()
        confidence, right = (float(each[in_bin_N] @ weights_N[in_bin_N] / weight) for each in (confidence_N, right_N))
        low, high = float(edges[number]), float(edges[number + 1])
        bins.append(ConfidenceBin(low, high, int(in_bin_N.sum()), confidence, right))
        ece += float(weight / weights_N.sum()) * abs(right - confidence)
    return Calibration(ece, float(np.average(_sigmoid(-margins_N) ** 2, weights=weights_N)), tuple(bins))


@dataclass(frozen=True)
class LengthBin:
    """The pairs whose chosen answer is longer than the rejected one by ``shortest`` to ``longest``.

    Below 0 it is shorter. ``middle`` is the median.
    """

    shortest: float
    middle: float
    longest: float
    accuracy: Proportion


@dataclass(frozen=True)
class LengthBias:
    """Accuracy compared with what lengths alone would reach.

    Attributes:
        longer_wins: Accuracy of preferring the longer answer; equal lengths count half.
        length_only: Accuracy of preferring the longer answer, or the shorter one, whichever is right more often.
        controlled: The mean of two accuracies, among the pairs whose chosen answer is longer and among those whose
            rejected one is; None where there are no pairs of a kind. Any rule that reads lengths alone gets 1/2. The
            use for length is ours; it is the balanced accuracy of Brodersen et al. (2010), whose two classes are which
            answer is longer.
        chosen_is_longer: The first of these two accuracies.
        rejected_is_longer: The second.
        bins: By difference in length, from rejected much longer to chosen much longer.
    """

    longer_wins: float
    length_only: float
    controlled: float | None
    chosen_is_longer: Proportion | None
    rejected_is_longer: Proportion | None
    bins: tuple[LengthBin, ...]

    @property
    def says_something(self) -> bool:
        """Whether any pair has answers of different lengths."""
        return self.chosen_is_longer is not None or self.rejected_is_longer is not None


def length_bias_of(right_N: np.ndarray, longer_N: np.ndarray, weights_N: np.ndarray) -> LengthBias:
    """Return the length bias of pairs.

    Args:
        right_N: Whether the chosen answer has the higher reward, N > 0.
        longer_N: Tokens of the chosen answer less those of the rejected one.
        weights_N: Weight of each pair.
    """

    def accuracy(here_N: np.ndarray) -> Proportion | None:
        weight = weights_N[here_N].sum()
        return proportion(float(right_N[here_N] @ weights_N[here_N]), weight) if weight else None

    bins = []
    for side_N in (longer_N < 0, longer_N == 0, longer_N > 0):
        if not side_N.any():
            continue
        # thirds of each side; pairs of equal lengths are their own bin
        edges = np.quantile(longer_N[side_N], (1 / 3, 2 / 3), method="inverted_cdf", weights=weights_N[side_N])
        bin_N = np.searchsorted(edges, longer_N, side="left")  # equal differences are never in two bins
        for number in np.unique(bin_N[side_N]):
            inside_N = side_N & (bin_N == number)
            low, middle, high = (float(end) for end in np.quantile(longer_N[inside_N], (0, 0.5, 1)))
            if (share := accuracy(inside_N)) is not None:
                bins.append(LengthBin(low, middle, high, share))
    longer_wins = float(np.average((np.sign(longer_N) + 1) / 2, weights=weights_N))
    chosen, rejected = accuracy(longer_N > 0), accuracy(longer_N < 0)
    return LengthBias(
        longer_wins=longer_wins,
        length_only=max(longer_wins, 1 - longer_wins),
        controlled=None if chosen is None or rejected is None else (chosen.value + rejected.value) / 2,
        chosen_is_longer=chosen,
        rejected_is_longer=rejected,
        bins=tuple(bins),
    )


@dataclass(frozen=True)
class Verdict:
    """Numbers on the rewards of pairs, of rankings, or of steps.

    Attributes:
        pairs: With two finite rewards; `left_out` had others. Of rankings, comparisons, of which those of one prompt
            together count once in all means.
        accuracy: Chosen above rejected; a tie is wrong.
        ties: Pairs of equal rewards.
        loss: Mean of ``-log(sigmoid(margin))``, of Bradley and Terry; without the margins that data may ask for.
        margins: Chosen less rejected reward.
        rewards: Of all answers, or of steps.
        length: None where no lengths are known.
        groups: Accuracy by label, in the labels' order.
        mean_over_groups: Each group counting the same; None without groups.
        worst: Indices of the rows that went most wrong, the worst first; none that is right.
        top1_accuracy: Of rankings, how often the highest reward is of an answer with the highest grade; where answers
            share the highest reward, the share of such answers among them.
        kendall_tau: Of rankings, the mean over prompts.
        of: "pairs", or "answers" or "steps", each compared with 0.
        prompts_in_training: How many evaluation prompts are also in the training data, and how many there are; empty
            where that is not known.
    """

    pairs: int
    left_out: int
    accuracy: Proportion
    ties: int
    loss: float
    margins: Distribution
    rewards: Distribution
    calibration: Calibration
    length: LengthBias | None
    groups: dict[str, Proportion]
    mean_over_groups: float | None
    worst: tuple[int, ...]
    top1_accuracy: Proportion | None = None
    kendall_tau: float | None = None
    of: str = "pairs"
    prompts_in_training: tuple[int, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, by the names that evaluation gives them, less its prefix."""
        named: Mapping[str, float | None] = {
            "accuracy_low": self.accuracy.low,
            "accuracy_high": self.accuracy.high,
            "ece": self.calibration.ece,
            "brier": self.calibration.brier,
            "length_only_accuracy": None if self.length is None else self.length.length_only,
            "length_controlled_accuracy": None if self.length is None else self.length.controlled,
            "mean_accuracy_over_groups": self.mean_over_groups,
            "top1_accuracy": None if self.top1_accuracy is None else self.top1_accuracy.value,
            "kendall_tau": self.kendall_tau,
            **{f"accuracy/{name}": each.value for name, each in self.groups.items()},
        }
        return {name: value for name, value in named.items() if value is not None}


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
