"""What an evaluation says of a reward model: accuracy with its interval, calibration, length bias."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from .reward_sums import Distribution, Proportion, by_group, distribution_of, is_finite, mean_of, proportion

_BINS = 10


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
    """How far confidence is from accuracy, in all and by confidence.

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


def sigmoid(values_N: np.ndarray) -> np.ndarray:
    """Return ``1 / (1 + exp(-value))``, which overflows for no value."""
    result_N: np.ndarray = np.exp(-np.logaddexp(0.0, -values_N))
    return result_N


def calibration_of(margins_N: np.ndarray, weights_N: np.ndarray | None = None) -> Calibration:
    """Return the calibration of finite margins, chosen less rejected reward, [N] with N > 0, by their weights."""
    weights_N = np.ones(len(margins_N)) if weights_N is None else weights_N
    confidence_N = sigmoid(np.abs(margins_N))
    right_N = (np.sign(margins_N) + 1) / 2
    edges = np.linspace(0.5, 1.0, _BINS + 1)
    bin_N = np.clip(np.digitize(confidence_N, edges) - 1, 0, _BINS - 1)  # the last one has its upper edge, too
    bins, ece = [], 0.0
    for number in np.unique(bin_N):
        in_bin_N = bin_N == number
        weight = weights_N[in_bin_N].sum()
        confidence, right = (float(each[in_bin_N] @ weights_N[in_bin_N] / weight) for each in (confidence_N, right_N))
        low, high = float(edges[number]), float(edges[number + 1])
        bins.append(ConfidenceBin(low, high, int(in_bin_N.sum()), confidence, right))
        ece += float(weight / weights_N.sum()) * abs(right - confidence)
    return Calibration(ece, float(np.average(sigmoid(-margins_N) ** 2, weights=weights_N)), tuple(bins))


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
    """Accuracy beside what lengths alone would reach.

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


def length_bias_of(rewards_N2: np.ndarray, lengths_N2: np.ndarray, weights_N: np.ndarray | None = None) -> LengthBias:
    """Return the length bias of pairs, chosen first.

    Args:
        rewards_N2: Finite rewards, N > 0.
        lengths_N2: Tokens of the answers. What the two answers of a pair share, such as the prompt, may be counted.
        weights_N: How much each pair counts; by default alike.
    """
    weights_N = np.ones(len(rewards_N2)) if weights_N is None else weights_N
    right_N = rewards_N2[:, 0] > rewards_N2[:, 1]
    longer_N = lengths_N2[:, 0] - lengths_N2[:, 1]
    longer_wins = float(np.average((np.sign(longer_N) + 1) / 2, weights=weights_N))
    chosen, rejected = (_accuracy(right_N, weights_N * is_longer_N) for is_longer_N in (longer_N > 0, longer_N < 0))
    return LengthBias(
        longer_wins=longer_wins,
        length_only=max(longer_wins, 1 - longer_wins),
        controlled=None if chosen is None or rejected is None else (chosen.value + rejected.value) / 2,
        chosen_is_longer=chosen,
        rejected_is_longer=rejected,
        bins=tuple(_bins(right_N, longer_N, weights_N)),
    )


def _accuracy(right_N: np.ndarray, weights_N: np.ndarray) -> Proportion | None:
    return proportion(float(right_N @ weights_N), weights_N.sum()) if weights_N.any() else None


def _bins(right_N: np.ndarray, longer_N: np.ndarray, weights_N: np.ndarray) -> list[LengthBin]:
    """Divide each side, rejected longer and chosen longer, into thirds; pairs of equal lengths are their own bin."""
    bins = []
    for side_N in (longer_N < 0, longer_N == 0, longer_N > 0):
        if not side_N.any():
            continue
        edges = np.quantile(longer_N[side_N], (1 / 3, 2 / 3), method="inverted_cdf", weights=weights_N[side_N])
        bin_N = np.searchsorted(edges, longer_N, side="left")  # equal differences are never in two bins
        for number in np.unique(bin_N[side_N]):
            inside_N = side_N & (bin_N == number)
            low, middle, high = (float(end) for end in np.quantile(longer_N[inside_N], (0, 0.5, 1)))
            share = proportion(float(right_N[inside_N] @ weights_N[inside_N]), weights_N[inside_N].sum())
            bins.append(LengthBin(low, middle, high, share))
    return bins


class NothingCompared(UserError):
    """No row has two rewards of which one should be higher."""


@dataclass(frozen=True)
class Verdict:
    """What the rewards of pairs say.

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
        worst: Indices of the pairs that went most wrong, the worst first; none that is right.
        top1_accuracy: Of rankings, how often the highest reward is of an answer with the highest grade; where answers
            share the highest reward, the share of such answers among them.
        kendall_tau: Of rankings, the mean over prompts.
        of: What the pairs are: of "steps" each is a step's reward and 0.
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


def judge_pairs(
    rewards_N2: np.ndarray,
    lengths_N2: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
    weights_N: np.ndarray | None = None,
    worst: int = 10,
    of: str = "pairs",
) -> Verdict:
    """Judge a model by its rewards of pairs, chosen first.

    Args:
        rewards_N2: Rewards; pairs of which one is not finite are left out, and counted.
        lengths_N2: Tokens of the answers.
        groups: The label of each pair.
        weights_N: How much each counts, but in groups; by default alike.
        worst: How many of the pairs that went most wrong to name, at most.
        of: What they are, see `Verdict`.

    Raises:
        NothingCompared: No pair has two finite rewards.
        UserError: Groups are too many.
    """
    rewards_N2 = np.asarray(rewards_N2, dtype=np.float64).reshape(-1, 2)
    kept = np.flatnonzero(is_finite(rewards_N2).all(axis=-1))
    if not len(kept):
        raise NothingCompared(f"None of {len(rewards_N2)} {of} has two finite rewards, so nothing can be said.")
    rewards_K2 = rewards_N2[kept]
    weights_K = np.ones(len(kept)) if weights_N is None else weights_N[kept]
    margins_K = rewards_K2[:, 0] - rewards_K2[:, 1]
    right_K = margins_K > 0
    rewards_A = rewards_K2.sum(axis=1) if of == "steps" else rewards_K2.ravel()
    accuracies = {} if groups is None else by_group(right_K, [groups[index] for index in kept.tolist()])
    worst_first = [number for number in np.argsort(margins_K, kind="stable") if not right_K[number]]
    return Verdict(
        pairs=len(kept),
        left_out=len(rewards_N2) - len(kept),
        accuracy=proportion(float(right_K @ weights_K), weights_K.sum()),
        ties=int((margins_K == 0).sum()),
        loss=float(np.average(np.logaddexp(0.0, -margins_K), weights=weights_K)),
        margins=distribution_of(margins_K, weights_K),
        rewards=distribution_of(rewards_A, weights_K.repeat(len(rewards_A) // len(kept))),
        calibration=calibration_of(margins_K, weights_K),
        length=None if lengths_N2 is None else length_bias_of(rewards_K2, lengths_N2[kept] * 1.0, weights_K),
        groups=accuracies,
        mean_over_groups=mean_of(accuracies),
        worst=tuple(int(kept[number]) for number in worst_first[:worst]),
        of=of,
    )
