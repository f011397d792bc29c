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
from ..data.comparisons import Labels
from ..data.row_formats import grades_of
from .distribution import is_finite
from .proportion import by_group, mean_of, proportion
from .reward_sums import order_of, tables_on_host
from .verdict import Verdict, judge_pairs

_HALVES = (("chosen", "rejected"), ("rejected", "chosen"))
_MOST_DRAWN = 128  # comparisons of a prompt


def top1_of(rewards_NK: np.ndarray, grade_NK: np.ndarray) -> np.ndarray:
    """Return the share of best-graded answers among those of each prompt with the highest (finite) reward, [N].

    With one best answer among k that share the highest reward it is RewardBench 2's 1/k (see `best_of_n`).
    """
    values = [np.where(np.isnan(grade_NK), -np.inf, each_NK) for each_NK in (rewards_NK, grade_NK)]
    highest_NK, best_NK = (each_NK == each_NK.max(axis=1, keepdims=True) for each_NK in values)
    credit_N: np.ndarray = (highest_NK & best_NK).sum(axis=1) / highest_NK.sum(axis=1)
    return credit_N


def judge_rankings(
    rewards_NK: np.ndarray,
    grade_NK: np.ndarray,
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
        rewards_NK: Of each answer.
        grade_NK: NaN where a prompt has no answer.
        lengths_NK: The tokens of each.
        groups: The label of each prompt.

    Raises:
        NothingCompared, UserError: As `judge_pairs`.
    """
    judged = np.flatnonzero((is_finite(rewards_NK) | np.isnan(grade_NK)).all(axis=1) & ~np.isnan(grade_NK).all(axis=1))
    rewards_JK, grade_JK = (each_NK[judged] for each_NK in (rewards_NK, grade_NK))
    chooser, orders, drawn = np.random.default_rng(0), [], []
    for part, table in tables_on_host(Labels(grade_JK[:, None].astype(np.float32), None, are_rankings=True)):
        rewards_S1 = torch.from_numpy(np.nan_to_num(rewards_JK[part])).double().reshape(-1, 1)
        every_P = torch.ones(len(table.row_weight_P), dtype=torch.bool)
        orders.append(order_of(rewards_S1, table, every_P).numpy())
        pairs_C2 = torch.stack([table.better_C, table.worse_C], dim=-1)[table.weight_C > 0].numpy()
        prompt_M, answers_M2 = pairs_C2[:, 0] // table.answers, pairs_C2 % table.answers
        drawn.append(np.column_stack([judged[part][prompt_M], answers_M2])[_draw(prompt_M, chooser)])
    if not drawn:
        return judge_pairs(rewards_NK[:0, :2])
    prompt_M, better_M, worse_M = np.concatenate(drawn).T

    def both(values_NK: np.ndarray) -> np.ndarray:
        return np.stack([values_NK[prompt_M, better_M], values_NK[prompt_M, worse_M]], axis=-1)

    lengths_M2 = None if lengths_NK is None else both(lengths_NK)
    verdict = judge_pairs(both(rewards_NK), lengths_M2, weights_N=1 / np.bincount(prompt_M)[prompt_M])
    order_J4 = np.concatenate(orders)
    has_any_J = order_J4[:, -1] > 0
    right_J, tied_J, margin_J, count_J = order_J4[has_any_J].T
    top1_J = top1_of(rewards_JK, grade_JK)[has_any_J]
    accuracies = {} if groups is None else by_group(right_J, [groups[at] for at in judged[has_any_J].tolist()])
    return replace(
        verdict,
        pairs=int(count_J.sum()),
        left_out=int((~np.isnan(grade_NK)).any(axis=1).sum()) - len(judged),
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
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first arrays that `judge_rankings` takes, of each row's rewards and grades, if it has any."""
    filled_2NK = np.full((2, len(grades), max(map(len, grades))), np.nan)
    for number, (rewards_K, grades_K) in enumerate(zip(rewards, grades, strict=True)):
        filled_2NK[:, number, : len(grades_K)] = rewards_K[: len(grades_K)], grades_K
    return filled_2NK[0], filled_2NK[1]
