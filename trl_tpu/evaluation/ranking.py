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
from ..data.judgements import Comparisons, grades_of
from .distribution import is_finite
from .proportion import by_group, mean_of, proportion
from .reward_sums import slices
from .verdict import Verdict, judge_pairs

_HALVES = (("chosen", "rejected"), ("rejected", "chosen"))
_MOST_DRAWN = 128  # comparisons of a prompt


def steps_compared(rewards_NK: torch.Tensor, labels: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return each labeled step's reward and 0, the one that should be higher first, [M, 2]."""
    found = Comparisons.of(rewards_NK.double(), torch.ones(len(rewards_NK), dtype=torch.bool), labels)
    return torch.stack([found.better, found.worse], dim=-1)[found.are_there].numpy()


def top1_of(rewards_NK: np.ndarray, grade_NK: np.ndarray, is_there_NK: np.ndarray) -> np.ndarray:
    """Return the share of best-graded answers among those of each prompt with the highest (finite) reward, [N].

    With one best answer among k that share the highest reward it is RewardBench 2's 1/k (see `best_of_n`).
    """
    values = [np.where(is_there_NK, each_NK, -np.inf) for each_NK in (rewards_NK, grade_NK)]
    highest_NK, best_NK = (each_NK == each_NK.max(axis=1, keepdims=True) for each_NK in values)
    credit_N: np.ndarray = (highest_NK & best_NK).sum(axis=1) / highest_NK.sum(axis=1)
    return credit_N


def judge_rankings(
    rewards_NK: np.ndarray,
    grade_NK: np.ndarray,
    is_there_NK: np.ndarray,
    lengths_NK: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> Verdict:
    """Judge a model by its rewards of ranked answers: by all comparisons of those with different grades.

    A prompt's comparisons are not independent, so they count once together in all means, and intervals count prompts.
    Kendall's tau is how many comparisons are right less how many are wrong, of all (tau-a where no grades are equal,
    https://doi.org/10.1093/biomet/30.1-2.81). So that memory does not grow with the square of the answers,
    distributions, loss, calibration and length bias are measured on at most 128 comparisons of each prompt (all, up to
    16 answers), drawn at random.

    Args:
        rewards_NK, grade_NK: Of each answer.
        is_there_NK: Which answers a prompt has.
        lengths_NK: The tokens of each.
        groups: The label of each prompt.

    Raises:
        NothingCompared, UserError: As `judge_pairs`.
    """
    judged = np.flatnonzero((is_finite(rewards_NK) | ~is_there_NK).all(axis=1))
    rewards_JK, grade_JK, is_there_JK = (each_NK[judged] for each_NK in (rewards_NK, grade_NK, is_there_NK))
    labels = {"grade": torch.from_numpy(grade_JK), "is_there": torch.from_numpy(is_there_JK)}
    every_J, answers = torch.ones(len(judged), dtype=torch.bool), rewards_NK.shape[1]
    chooser, orders, drawn = np.random.default_rng(0), [], []
    for part in slices(len(judged), answers**2):
        some = {name: values[part] for name, values in labels.items()}
        compared = Comparisons.of(torch.from_numpy(rewards_JK[part]), every_J[part], some)
        orders.append(torch.stack([*compared.means, compared.are_there.sum(-1)], dim=-1).numpy())
        prompt_M, cell_M = compared.are_there.numpy().nonzero()
        kept = _draw(prompt_M, chooser)
        drawn.append(np.stack([judged[part][prompt_M], cell_M // answers, cell_M % answers])[:, kept])
    if not drawn:
        return judge_pairs(rewards_NK[:0, :2])
    prompt_M, better_M, worse_M = np.concatenate(drawn, axis=1)

    def both(values_NK: np.ndarray) -> np.ndarray:
        return np.stack([values_NK[prompt_M, better_M], values_NK[prompt_M, worse_M]], axis=-1)

    lengths_M2 = None if lengths_NK is None else both(lengths_NK)
    verdict = judge_pairs(both(rewards_NK), lengths_M2, weights_N=1 / np.bincount(prompt_M)[prompt_M])
    order_J4 = np.concatenate(orders)
    has_any_J = order_J4[:, -1] > 0
    right_J, tied_J, margin_J, count_J = order_J4[has_any_J].T
    top1_J = top1_of(rewards_JK, grade_JK, is_there_JK)[has_any_J]
    accuracies = {} if groups is None else by_group(right_J, [groups[at] for at in judged[has_any_J].tolist()])
    return replace(
        verdict,
        pairs=int(count_J.sum()),
        left_out=len(rewards_NK) - len(judged),
        accuracy=proportion(float(right_J.sum()), len(right_J)),
        ties=round(float(tied_J @ count_J)),
        margins=replace(verdict.margins, mean=float(margin_J.mean())),
        groups=accuracies,
        mean_over_groups=mean_of(accuracies),
        worst=tuple(dict.fromkeys(int(prompt_M[at]) for at in verdict.worst)),
        top1_accuracy=proportion(float(top1_J.sum()), len(right_J)),
        kendall_tau=float((2 * right_J + tied_J - 1).mean()),
    )


def _draw(prompt_M: np.ndarray, chooser: np.random.Generator) -> np.ndarray:
    """Draw at most `_MOST_DRAWN` comparisons of each prompt, by their places in order; ``prompt_M`` is sorted."""
    mixed = chooser.permutation(len(prompt_M))
    by_prompt = mixed[np.argsort(prompt_M[mixed], kind="stable")]
    place_M = np.arange(len(prompt_M)) - np.searchsorted(prompt_M, prompt_M)
    return np.sort(by_prompt[place_M < _MOST_DRAWN])


def parts_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what is judged of a scored row by itself: often the row.

    Of answers that attributes grade it is a ranking for each `attribute`; of steps with labels a pair for each, of its
    reward and 0, of which the reward is the chosen one's where the step is right. A pair whose `chosen_probability` is
    below 0.5 has its halves exchanged; at 0.5 it is not judged.
    """
    labels: Any = row.get("labels")
    probability = row.get("chosen_probability")
    if isinstance(probability, int | float) and "reward_chosen" in row and probability <= 0.5:
        names = [(f"{of}{one}", f"{of}{other}") for of in ("", "reward_", "tokens_") for one, other in _HALVES]
        return [{**row, **{one: row[other] for one, other in names if other in row}}] if probability < 0.5 else []
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
