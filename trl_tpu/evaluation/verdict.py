"""The verdict on a reward model: what its rewards of held-out pairs say about it, in numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from .calibration import Calibration, calibration_of
from .distribution import Distribution, distribution_of, is_finite
from .length_bias import LengthBias, length_bias_of
from .proportion import Proportion, by_group, mean_of, proportion


class NothingCompared(UserError):
    """No row has two rewards of which one should be higher."""


@dataclass(frozen=True)
class Verdict:
    """What the rewards of pairs say.

    Attributes:
        pairs: With two finite rewards; `left_out` had others. Of rankings, comparisons, of which those of one prompt
            together count once in all means.
        accuracy: Chosen above rejected; a tie is wrong.
        ties: Pairs of equal rewards.
        loss: Mean of ``-log(sigmoid(margin))``, of Bradley and Terry; without the margins that data may ask for.
        margins: Chosen less rejected reward.
        rewards: Of all answers, or of steps.
        length: None where no lengths are known.
        groups: Accuracy by label, in the labels' order.
        mean_over_groups: Each group counting the same; None without groups.
        worst: Indices of the pairs that went most wrong, the worst first; none that is right.
        top1_accuracy: Of rankings, how often the highest reward is of an answer with the highest grade; where answers
            share the highest reward, the share of such answers among them.
        kendall_tau: Of rankings, the mean over prompts.
        of: What the pairs are: of "steps" each is a step's reward and 0.
        prompts_in_training: How many evaluation prompts are also in the training data, and how many there are; empty
            where that is not known.
    """

    pairs: int
    left_out: int
    accuracy: Proportion
    ties: int
    loss: float
    margins: Distribution
    rewards: Distribution
    calibration: Calibration
    length: LengthBias | None
    groups: dict[str, Proportion]
    mean_over_groups: float | None
    worst: tuple[int, ...]
    top1_accuracy: Proportion | None = None
    kendall_tau: float | None = None
    of: str = "pairs"
    prompts_in_training: tuple[int, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, by the names that evaluation gives them, less its prefix."""
        named: Mapping[str, float | None] = {
            "accuracy_low": self.accuracy.low,
            "accuracy_high": self.accuracy.high,
            "ece": self.calibration.ece,
            "brier": self.calibration.brier,
            "length_only_accuracy": None if self.length is None else self.length.length_only,
            "length_controlled_accuracy": None if self.length is None else self.length.controlled,
            "mean_accuracy_over_groups": self.mean_over_groups,
            "top1_accuracy": None if self.top1_accuracy is None else self.top1_accuracy.value,
            "kendall_tau": self.kendall_tau,
            **{f"accuracy/{name}": each.value for name, each in self.groups.items()},
        }
        return {name: value for name, value in named.items() if value is not None}


def judge_pairs(
    rewards_N2: np.ndarray,
    lengths_N2: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
    weights_N: np.ndarray | None = None,
    worst: int = 10,
    of: str = "pairs",
) -> Verdict:
    """Judge a model by its rewards of pairs, chosen first.

    Args:
        rewards_N2: Rewards; pairs of which one is not finite are left out, and counted.
        lengths_N2: Tokens of the answers.
        groups: The label of each pair.
        weights_N: How much each counts, but in groups; by default alike.
        worst: How many of the pairs that went most wrong to name, at most.
        of: What they are, see `Verdict`.

    Raises:
        NothingCompared: No pair has two finite rewards.
        UserError: Groups are too many.
    """
    rewards_N2 = np.asarray(rewards_N2, dtype=np.float64).reshape(-1, 2)
    kept = np.flatnonzero(is_finite(rewards_N2).all(axis=-1))
    if not len(kept):
        raise NothingCompared(f"None of {len(rewards_N2)} {of} has two finite rewards, so nothing can be said.")
    rewards_K2 = rewards_N2[kept]
    weights_K = np.ones(len(kept)) if weights_N is None else weights_N[kept]
    margins_K = rewards_K2[:, 0] - rewards_K2[:, 1]
    right_K = margins_K > 0
    rewards_A = rewards_K2.sum(axis=1) if of == "steps" else rewards_K2.ravel()
    accuracies = {} if groups is None else by_group(right_K, [groups[index] for index in kept.tolist()])
    worst_first = [number for number in np.argsort(margins_K, kind="stable") if not right_K[number]]
    return Verdict(
        pairs=len(kept),
        left_out=len(rewards_N2) - len(kept),
        accuracy=proportion(float(right_K @ weights_K), weights_K.sum()),
        ties=int((margins_K == 0).sum()),
        loss=float(np.average(np.logaddexp(0.0, -margins_K), weights=weights_K)),
        margins=distribution_of(margins_K, weights_K),
        rewards=distribution_of(rewards_A, weights_K.repeat(len(rewards_A) // len(kept))),
        calibration=calibration_of(margins_K, weights_K),
        length=None if lengths_N2 is None else length_bias_of(rewards_K2, lengths_N2[kept] * 1.0, weights_K),
        groups=accuracies,
        mean_over_groups=mean_of(accuracies),
        worst=tuple(int(kept[number]) for number in worst_first[:worst]),
        of=of,
    )
