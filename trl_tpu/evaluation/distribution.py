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
        counts: Numbers in each bin; the last bin has its upper edge, too.
    """

    mean: float
    std: float
    lowest: float
    highest: float
    quantiles: dict[str, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]


def distribution_of(values_N: np.ndarray) -> Distribution:
    """Return the distribution of finite numbers, [N] with N > 0.

    The histogram's bins are of equal width on either side of 0, so that no bin of margins has right and wrong ones.
    """
    most = largest if (largest := float(np.abs(values_N).max())) > 1e-300 else 1.0  # bins need a width
    counts, edges = np.histogram(values_N, bins=_BINS, range=(-most, most))
    return Distribution(
        mean=float(values_N.mean()),
        std=float(values_N.std()),
        lowest=float(values_N.min()),
        highest=float(values_N.max()),
        quantiles={str(share): float(np.quantile(values_N, share)) for share in QUANTILES},
        edges=tuple(map(float, edges)),
        counts=tuple(map(int, counts)),
    )
