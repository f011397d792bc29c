"""Pairs by their lengths: how many tokens have to be computed, and who attends to whom. numpy only."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PairLengths:
    """Tokens of each pair's common prefix, and of the two tails after it."""

    prefix_P: np.ndarray
    chosen_P: np.ndarray
    rejected_P: np.ndarray

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int, int]]) -> "PairLengths":
        return cls(*np.array(list(pairs), dtype=np.int64).reshape(-1, 3).T)

    @classmethod
    def of_size(cls, size: int) -> "PairLengths":
        """Return one pair of ``size`` unique tokens: half of them prompt, a quarter in each answer."""
        answer = max(1, size // 4)
        return cls.of([(size - 2 * answer, answer, answer)])

    def drawn(self, count: int) -> "PairLengths":
        """Return ``count`` pairs, drawn from these with replacement and always alike."""
        drawn_P = np.random.default_rng(0).integers(0, len(self), count)
        return PairLengths(self.prefix_P[drawn_P], self.chosen_P[drawn_P], self.rejected_P[drawn_P])

    def __len__(self) -> int:
        return len(self.prefix_P)

    @property
    def sizes_P(self) -> np.ndarray:
        """Unique tokens of each pair: the prefix counts once."""
        return self.prefix_P + self.chosen_P + self.rejected_P

    @property
    def longest_dialogue(self) -> int:
        return int((self.prefix_P + np.maximum(self.chosen_P, self.rejected_P)).max())

    @property
    def tokens(self) -> int:
        """Unique tokens of all pairs."""
        return int(self.sizes_P.sum())

    def attended(self, window: int | None = None) -> int:
        """Count pairs of tokens of which one attends to the other: itself and those before it in its dialogue.

        Args:
            window: How many tokens a token sees at most, itself among them.
        """
        shared_P = _seen(self.prefix_P, window)
        tails = (_seen(self.prefix_P + tail_P, window) - shared_P for tail_P in (self.chosen_P, self.rejected_P))
        return int((shared_P + sum(tails)).sum())


def _seen(length_P: np.ndarray, window: int | None) -> np.ndarray:
    """Count what the tokens of a causal text of each length see, all together."""
    short_P = length_P if window is None else np.minimum(length_P, window)
    return short_P * (short_P + 1) // 2 + (length_P - short_P) * (window or 0)
