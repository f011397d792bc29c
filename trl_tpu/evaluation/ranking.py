"""How well rewards order ranked answers, on the host.

Letters: N prompts, K answers of each, M comparisons, J prompts that have any.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..data.checks import are_labels
from ..data.judgements import Comparisons, answers_there, grades_of, is_above, weighted
from .proportion import by_group, mean_of, proportion
from .reward_sums import RewardSums, sums_of
from .verdict import Verdict, judge_pairs


def compared(rewards_NK: torch.Tensor, mask_N: torch.Tensor, labels: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return the rewards of all comparisons, the better one's first [M, 2]; a step's is with 0."""
    found = Comparisons.of(rewards_NK, mask_N, labels)
    return torch.stack([found.better, found.worse], dim=-1)[found.are_there].numpy()


def judged_sums(
    rewards_NK: torch.Tensor, mask_N: torch.Tensor, labels: Mapping[str, torch.Tensor], weights: Sequence[float] = ()
) -> RewardSums:
    """Return the sums over the pairs or ranked answers that ``mask_N`` keeps.

    Of several attributes all comparisons count, and as rewards their sums by ``weights``.
    """
    compared_M2 = compared(rewards_NK, mask_N, labels)
    if "is_there" not in labels:
        return sums_of(compared_M2)
    rewards_A = weighted(rewards_NK, weights)[answers_there(labels["is_there"]) & mask_N[:, None]]
    return sums_of(compared_M2, rewards_A.numpy(), int(mask_N.sum()))


def judge_rankings(
    rewards_NK: np.ndarray,
    grade_NK: np.ndarray,
    is_there_NK: np.ndarray,
    lengths_NK: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> Verdict:
    """Judge a model by its rewards of ranked answers: by all comparisons of those with different grades.

    A prompt's comparisons are not independent, so shares are means over prompts and their intervals count prompts.
    Kendall's tau is how many comparisons are right less how many are wrong, of all (tau-a where no grades are equal,
    https://doi.org/10.1093/biomet/30.1-2.81).

    Args:
        rewards_NK, grade_NK: Of each answer.
        is_there_NK: Which answers a prompt has.
        lengths_NK: The tokens of each.
        groups: The label of each prompt.

    Raises:
        UserError: As `judge_pairs`.
    """
    is_judged_N = (np.isfinite(rewards_NK) | ~is_there_NK).all(axis=1)
    above_NKK = is_above(grade_NK, is_there_NK)
    prompt_M, better_M, worse_M = np.nonzero(above_NKK & is_judged_N[:, None, None])

    def both(values_NK: np.ndarray) -> np.ndarray:
        return np.stack([values_NK[prompt_M, better_M], values_NK[prompt_M, worse_M]], axis=-1)

    rewards_M2 = both(rewards_NK)
    verdict = judge_pairs(rewards_M2, None if lengths_NK is None else both(lengths_NK))
    judged_J, comparisons_J = np.unique(prompt_M, return_counts=True)
    margins_M = rewards_M2[:, 0] - rewards_M2[:, 1]
    right_J, wrong_J = (np.bincount(prompt_M, each_M)[judged_J] for each_M in (margins_M > 0, margins_M < 0))
    best_NK = np.where(is_there_NK, rewards_NK, -np.inf).argmax(axis=1)[:, None]
    top_J = ~np.take_along_axis(above_NKK.any(axis=1), best_NK, axis=1)[judged_J, 0]
    accuracies = {} if groups is None else by_group(right_J / comparisons_J, [groups[at] for at in judged_J.tolist()])
    return replace(
        verdict,
        left_out=int((~is_judged_N).sum()),
        accuracy=proportion(float((right_J / comparisons_J).sum()), len(judged_J)),
        groups=accuracies,
        mean_over_groups=mean_of(accuracies),
        worst=tuple(dict.fromkeys(int(prompt_M[at]) for at in verdict.worst)),
        top1_accuracy=proportion(int(top_J.sum()), len(judged_J)),
        kendall_tau=float(((right_J - wrong_J) / comparisons_J).mean()),
    )


def parts_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what is judged of a scored row by itself: often the row.

    Of answers that attributes grade it is a ranking for each `attribute`; of steps with labels a pair for each, of its
    reward and 0, of which the reward is the chosen one's where the step is right.
    """
    labels: Any = row.get("labels")
    if isinstance(rewards := row.get("step_rewards"), list) and are_labels(labels, len(rewards)):
        steps, parts = row.get("completions") or [], list[Mapping[str, Any]]()
        for end, (label, reward) in enumerate(zip(labels, rewards, strict=True), start=1):
            better, worse = (reward, 0.0) if label else (0.0, reward)
            parts.append({**row, "completions": steps[:end], "reward_chosen": better, "reward_rejected": worse})
        return parts
    scores, rewards = row.get("scores"), row.get("rewards_by_attribute") or [None]
    graded = scores if isinstance(scores, dict) and None not in rewards else {}
    by_name = {name: [each[name] for each in rewards] for name in graded if name in rewards[0]}
    return [{**row, "attribute": name, "scores": graded[name], "rewards": by_name[name]} for name in by_name] or [row]


def grades_beside_rewards(row: Mapping[str, Any]) -> list[float]:
    """Return the grades of a scored row's answers; none where it does not have a number for each of its `rewards`."""
    column, rewards = "scores" if "scores" in row else "ranks", row.get("rewards")
    values = row.get(column)
    if "completions" not in row or not isinstance(rewards, list) or not isinstance(values, list):
        return []
    are_numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    return grades_of(row) if are_numbers and len(values) == len(rewards) else []


def rankings_of(
    rewards: Sequence[Sequence[float]], grades: Sequence[Sequence[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first arrays that `judge_rankings` takes, of each row's rewards and grades, if it has any."""
    filled_NK = np.zeros((3, len(grades), max(map(len, grades))))
    for number, (rewards_K, grades_K) in enumerate(zip(rewards, grades, strict=True)):
        count = len(grades_K)
        filled_NK[:, number, :count] = rewards_K[:count], grades_K, np.ones(count)
    return filled_NK[0], filled_NK[1], filled_NK[2] > 0
