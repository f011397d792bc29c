"""Measure how much of an accuracy is only length, beside baselines that never read an answer."""

from dataclasses import dataclass

import numpy as np

from .proportion import Proportion, proportion


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
