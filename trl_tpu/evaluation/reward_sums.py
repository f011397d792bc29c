"""Sums over compared rewards, from which accuracy, margin, ties, mean and extremes follow: their one code.

A pair is one comparison of two answers; ranked answers are compared with one another. Training adds the same sums up
on the device (`training.metrics`); both are divided here.
"""

from dataclasses import dataclass

import numpy as np

COUNTS = ("pairs", "correct", "ties", "comparisons", "answers")
SUMS = ("reward", "margin", "squares")


@dataclass
class RewardSums:
    """Everything the metrics need, over some pairs, on the host."""

    pairs: int = 0  # or prompts of ranked answers
    correct: int = 0
    ties: int = 0
    comparisons: int = 0
    answers: int = 0
    tokens: int = 0
    reward: float = 0.0
    margin: float = 0.0
    squares: float = 0.0  # of rewards
    lowest: float = float("inf")
    highest: float = float("-inf")

    def __add__(self, other: "RewardSums") -> "RewardSums":
        """Return the sums over both sets of pairs."""
        added = {name: getattr(self, name) + getattr(other, name) for name in (*COUNTS, "tokens", *SUMS)}
        # numpy's keep NaN, which Python's leave out where it comes second
        lowest, highest = np.minimum(self.lowest, other.lowest), np.maximum(self.highest, other.highest)
        return RewardSums(**added, lowest=float(lowest), highest=float(highest))

    def metrics(self) -> dict[str, float]:
        """Return means: strict accuracy (chosen > rejected), margin, ties, rewards; extremes of rewards."""
        if not self.comparisons:
            return {}
        return {
            "min_reward": self.lowest,
            "mean_reward": self.reward / self.answers,
            "max_reward": self.highest,
            "accuracy": self.correct / self.comparisons,
            "margin": self.margin / self.comparisons,
            "tie_rate": self.ties / self.comparisons,
        }


def sums_of(compared_N2: np.ndarray, rewards_A: np.ndarray | None = None, pairs: int | None = None) -> RewardSums:
    """Return the sums over compared rewards, the better answer's first, in float64.

    Args:
        compared_N2: The rewards of pairs, or of all comparisons of ranked answers.
        rewards_A: Of all answers, where that is something else.
        pairs: How many pairs or prompts, where that is something else.
    """
    if not len(compared_N2):
        return RewardSums()
    compared_N2 = compared_N2.astype(np.float64)
    chosen_N, rejected_N = compared_N2.T
    every = compared_N2 if rewards_A is None else rewards_A.astype(np.float64)[:, None]
    return RewardSums(
        pairs=len(chosen_N) if pairs is None else pairs,
        correct=int((chosen_N > rejected_N).sum()),
        ties=int((chosen_N == rejected_N).sum()),
        comparisons=len(chosen_N),
        answers=every.size,
        reward=float(every.sum(axis=1).sum()),
        margin=float((chosen_N - rejected_N).sum()),
        squares=float((every**2).sum(axis=1).sum()),
        lowest=float(every.min()),
        highest=float(every.max()),
    )
