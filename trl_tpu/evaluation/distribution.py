"""Distributions of margins or rewards."""

from dataclasses import dataclass

import numpy as np

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
