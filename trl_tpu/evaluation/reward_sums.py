"""Sums over pairs of rewards, from which accuracy, margin, ties, mean and extremes follow: their one code.

Training adds the same sums up on the device (`training.metrics`); both are divided here.
"""

from dataclasses import dataclass

import numpy as np

COUNTS = ("pairs", "correct", "ties")
SUMS = ("reward", "margin", "squares")


@dataclass
class RewardSums:
    """Everything the metrics need, over some pairs, on the host."""

    pairs: int = 0
    correct: int = 0
    ties: int = 0
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
        """Return means over pairs: strict accuracy (chosen > rejected), margin, ties, rewards; extremes of rewards."""
        if not self.pairs:
            return {}
        return {
            "min_reward": self.lowest,
            "mean_reward": self.reward / (2 * self.pairs),
            "max_reward": self.highest,
            "accuracy": self.correct / self.pairs,
            "margin": self.margin / self.pairs,
            "tie_rate": self.ties / self.pairs,
        }


def sums_of(rewards_N2: np.ndarray, tokens: int = 0) -> RewardSums:
    """Return the sums over pairs of rewards, chosen first, in float64."""
    if not len(rewards_N2):
        return RewardSums()
    chosen_N, rejected_N = rewards_N2.astype(np.float64).T
    return RewardSums(
        pairs=len(chosen_N),
        correct=int((chosen_N > rejected_N).sum()),
        ties=int((chosen_N == rejected_N).sum()),
        tokens=tokens,
        reward=float((chosen_N + rejected_N).sum()),
        margin=float((chosen_N - rejected_N).sum()),
        squares=float((chosen_N**2 + rejected_N**2).sum()),
        lowest=float(rewards_N2.min()),
        highest=float(rewards_N2.max()),
    )
