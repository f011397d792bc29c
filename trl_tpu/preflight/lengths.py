"""The pairs of a step by their lengths: how many tokens have to be computed, and who attends to whom. numpy only."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PairLengths:
    """Of each pair of a step, tokens of the common prefix and of the two tails after it."""

    prefix_P: np.ndarray
    chosen_P: np.ndarray
    rejected_P: np.ndarray

    @classmethod
    def alike(cls, pairs: int, size: int) -> "PairLengths":
        """Pairs of ``size`` unique tokens, half of them prompt and a quarter in each answer."""
        answer = max(1, size // 4)
        return cls(np.full(pairs, size - 2 * answer), np.full(pairs, answer), np.full(pairs, answer))

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int, int]]) -> "PairLengths":
        prefix_P, chosen_P, rejected_P = np.array(list(pairs), dtype=np.int64).reshape(-1, 3).T
        return cls(prefix_P, chosen_P, rejected_P)

    def __len__(self) -> int:
        return len(self.prefix_P)

    @property
    def sizes_P(self) -> np.ndarray:
        """Unique tokens of each pair: the prefix counts once."""
        return self.prefix_P + self.chosen_P + self.rejected_P

    @property
    def tokens(self) -> int:
        """Unique tokens of all pairs."""
        return int(self.sizes_P.sum())

    def attended(self, window: int | None = None) -> int:
        """Pairs of tokens of which one attends to the other: itself and those before it in its dialogue.

        Args:
            window: How many tokens a token sees at most, itself among them.
        """
        shared_P = _triangle(self.prefix_P, window)
        tails = (_triangle(self.prefix_P + tail_P, window) - shared_P for tail_P in (self.chosen_P, self.rejected_P))
        return int((shared_P + sum(tails)).sum())


def _triangle(length_P: np.ndarray, window: int | None) -> np.ndarray:
    """What the tokens of a causal text of each length see, all together."""
    length_P = length_P.astype(np.int64)
    if window is None:
        return length_P * (length_P + 1) // 2
    short_P = np.minimum(length_P, window)
    return short_P * (short_P + 1) // 2 + (length_P - short_P) * window
