"""Measure whether a margin says how sure one may be.

The model of Bradley and Terry takes ``sigmoid(margin)`` for the probability that the chosen answer is the better one.
A pair's answer with the higher reward is the model's pick, and ``sigmoid(|margin|)``, from 1/2 to 1, its confidence in
it. The model is calibrated if of the picks with confidence p a share p are the chosen answers.
"""

from dataclasses import dataclass

import numpy as np

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
