"""Pairs by their lengths: how many tokens have to be computed, and who attends to whom. numpy only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PairLengths:
    """Tokens of each pair's common prefix, and of its sequences' tails after it: of two, or of K ranked answers."""

    prefix_P: np.ndarray
    tails_PK: np.ndarray
    """0 for answers that a prompt does not have."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int, int]]) -> "PairLengths":
        """Return pairs of which each is given as the tokens of its prefix, its chosen and its rejected tail."""
        lengths_P3 = np.array(list(pairs), dtype=np.int64).reshape(-1, 3)
        return cls(lengths_P3[:, 0], lengths_P3[:, 1:])

    @classmethod
    def joined(cls, parts: Sequence["PairLengths"]) -> "PairLengths":
        """Return the pairs of all parts, one after another."""
        if not parts:
            return cls.of([])
        most = max(part.tails_PK.shape[1] for part in parts)
        tails = [np.pad(part.tails_PK, ((0, 0), (0, most - part.tails_PK.shape[1]))) for part in parts]
        return cls(np.concatenate([part.prefix_P for part in parts]), np.concatenate(tails))

    @classmethod
    def of_size(cls, size: int) -> "PairLengths":
        """Return one pair of ``size`` unique tokens: half of them prompt, a quarter in each answer."""
        answer = max(1, size // 4)
        return cls.of([(size - 2 * answer, answer, answer)])

    def __len__(self) -> int:
        return len(self.prefix_P)

    @property
    def sizes_P(self) -> np.ndarray:
        """Unique tokens of each pair: the prefix counts once."""
        return self.prefix_P + self.tails_PK.sum(axis=1)

    @property
    def longest_P(self) -> np.ndarray:
        """Tokens of the longest sequence of each pair."""
        return self.prefix_P + self.tails_PK.max(axis=1, initial=0)

    @property
    def tokens(self) -> int:
        """Unique tokens of all pairs."""
        return int(self.sizes_P.sum())

    def attended(self, window: int | None = None) -> int:
        """Count pairs of tokens of which one attends to the other: itself and those before it in its sequence.

        Args:
            window: How many tokens a token sees at most, itself among them.
        """
        shared_P = _seen(self.prefix_P, window)
        tails = (_seen(self.prefix_P + tail_P, window) - shared_P for tail_P in self.tails_PK.T)
        return int((shared_P + sum(tails)).sum())


def _seen(length_P: np.ndarray, window: int | None) -> np.ndarray:
    """Count what the tokens of a causal text of each length see, all together."""
    short_P = length_P if window is None else np.minimum(length_P, window)
    return short_P * (short_P + 1) // 2 + (length_P - short_P) * (window or 0)
