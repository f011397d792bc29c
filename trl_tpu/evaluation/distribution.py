"""How numbers are distributed: margins, or rewards."""

from dataclasses import dataclass

import numpy as np

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MOST_BINS = 40


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

    The histogram's bins are as wide as the rule of Freedman and Diaconis (1981) says, or some wider, so that they are
    40 at most. 0 is an edge, so that of margins no bin has right and wrong ones.
    """
    width = 2 * float(np.subtract(*np.quantile(values_N, [0.75, 0.25]))) / len(values_N) ** (1 / 3)
    width = max(width, float(np.ptp(values_N)) / (_MOST_BINS - 2)) or 1.0
    first, last = np.floor(values_N.min() / width), np.floor(values_N.max() / width) + 1
    edges = width * np.arange(first, last + 1)
    edges[0], edges[-1] = min(edges[0], values_N.min()), max(edges[-1], values_N.max())  # these could round off
    counts, _ = np.histogram(values_N, bins=edges)
    return Distribution(
        mean=float(values_N.mean()),
        std=float(values_N.std()),
        lowest=float(values_N.min()),
        highest=float(values_N.max()),
        quantiles={str(share): float(np.quantile(values_N, share)) for share in QUANTILES},
        edges=tuple(map(float, edges)),
        counts=tuple(map(int, counts)),
    )
