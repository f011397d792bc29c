"""Judges rewards: of pairs, of rankings (top 1, Kendall's tau, best of N), of steps."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..data.checks import are_labels
from ..data.comparisons import Labels
from ..data.measure import is_prepared, measure, read_row
from ..data.row_formats import grades_of
from ..errors import UserError
from .reward_sums import (
    Proportion,
    by_group,
    check_groups,
    is_finite,
    label_of,
    mean_of,
    order_of,
    pairs_of,
    proportion,
    sums_on_host,
    tables_on_host,
)
from .verdict import NothingCompared, Verdict, judge_pairs

logger = logging.getLogger(__name__)

TIES = "ties"  # the name of RewardBench 2's subset of its own rule, in whatever case


@dataclass(frozen=True)
class Answers:
    """The rewards of one row's answers.

    Attributes:
        chosen: Of the right answers, one or more.
        rejected: Of the wrong ones, one or more.
        id: In RewardBench 2's subset Ties ``ref:NUMBER`` or ``tied:NUMBER``.
    """

    chosen: Sequence[float]
    rejected: Sequence[float]
    id: str = ""

    @property
    def credit(self) -> float:
        """The share of right answers among those with the highest reward.

        With one right answer among k that are highest this is RewardBench 2's 1/k, and 0 if it is none of them.
        """
        highest = max(*self.chosen, *self.rejected)
        right, wrong = (sum(reward == highest for reward in rewards) for rewards in (self.chosen, self.rejected))
        return right / (right + wrong)

    @property
    def is_finite(self) -> bool:
        return bool(is_finite(np.array([*self.chosen, *self.rejected])).all())


@dataclass(frozen=True)
class BestOfN:
    """How often the best of several answers is a right one.

    Attributes:
        rows: With finite rewards; `left_out` had others.
        accuracy: Mean credit over all rows, those of a subset Ties among them.
        groups: Of each subset: mean credit, but of Ties its own score, which has no interval (nan).
        mean_over_groups: RewardBench 2's score, where the groups are its subsets.
        worst: Indices of rows, those first whose best wrong answer is the most above their best right one.
    """

    rows: int
    left_out: int
    accuracy: Proportion
    groups: dict[str, Proportion]
    mean_over_groups: float | None
    worst: tuple[int, ...]


def judge_best_of_n(rows: Sequence[Answers], groups: Sequence[str] | None = None, worst: int = 10) -> BestOfN:
    """Judge rows of several answers.

    Args:
        groups: The subset of each row.
        worst: How many of the rows that went most wrong to name, at most.

    Raises:
        UserError: No row has finite rewards only, or the rows of a subset Ties are not as its rule needs them.
    """
    kept = [index for index, row in enumerate(rows) if row.is_finite]
    if not kept:
        raise UserError(f"None of {len(rows)} rows has finite rewards for all of its answers, so nothing can be said.")
    credit_N = np.array([rows[index].credit for index in kept])
    scores = {} if groups is None else by_group(credit_N, [groups[index] for index in kept])
    for name in scores:
        if groups is not None and name.lower() == TIES:
            ties = [rows[index] for index in kept if groups[index] == name]
            scores[name] = Proportion(ties_score(ties), float("nan"), float("nan"), len(ties))
    gap_N = np.array([max(rows[index].chosen) - max(rows[index].rejected) for index in kept])
    worst_first = [kept[number] for number in np.argsort(gap_N, kind="stable") if gap_N[number] <= 0]
    return BestOfN(
        rows=len(kept),
        left_out=len(rows) - len(kept),
        accuracy=proportion(float(credit_N.sum()), len(kept)),
        groups=scores,
        mean_over_groups=mean_of(scores),
        worst=tuple(worst_first[:worst]),
    )


def ties_score(rows: Sequence[Answers]) -> float:
    """Return RewardBench 2's score of its subset Ties, whose questions have several right answers.

    Every question is asked twice: as ``tied:NUMBER`` with several right answers, and as ``ref:NUMBER`` with one. A row
    is right if all its right answers are above all wrong ones; ``gap`` is by how much, ``spread`` how far the right
    ones are from each other. The score is

        0.3 * share of tied rows that are right + 0.3 * share of ref rows that are right
        + 0.2 * share of questions with gap of tied > spread + 0.2 * with the smaller gap of tied and ref > spread
        + 0.01 * mean of tanh(smaller gap / spread - 1), where 0 / 0 is 0

    Raises:
        UserError: An id of another form, a tied row with one right answer, or no question that is asked both ways.
    """
    by_id = {row.id: row for row in rows}
    gaps = {id_: min(row.chosen) - max(row.rejected) for id_, row in by_id.items()}
    tied, ref = ({id_ for id_ in by_id if id_.startswith(kind)} for kind in ("tied:", "ref:"))
    both_ways = sorted(id_ for id_ in tied if id_.replace("tied", "ref", 1) in ref)
    is_alone = any(len(by_id[id_].chosen) < 2 for id_ in both_ways)
    if len(tied) + len(ref) < len(rows) or not both_ways or is_alone:
        raise UserError(
            "RewardBench 2's rule for its subset Ties needs an `id` of each row, once: `ref:NUMBER`, or `tied:NUMBER` "
            "with two right answers or more, and questions that are asked both ways. Give whole questions with such "
            "ids, or the subset another name."
        )
    spread_Q = np.array([np.ptp(by_id[id_].chosen) for id_ in both_ways])
    tied_Q = np.array([gaps[id_] for id_ in both_ways])
    smaller_Q = np.minimum(tied_Q, [gaps[id_.replace("tied", "ref", 1)] for id_ in both_ways])
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond_Q = np.nan_to_num(np.tanh(smaller_Q / spread_Q - 1), nan=0.0)
    right_shares = [np.mean([gaps[id_] > 0 for id_ in kind]) for kind in (tied, ref)]
    above_spread = [np.mean(gap_Q > spread_Q) for gap_Q in (tied_Q, smaller_Q)]
    return float(0.3 * sum(right_shares) + 0.2 * sum(above_spread) + 0.01 * np.mean(beyond_Q))


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


def judge(
    rewards_NAK: torch.Tensor, labels: Labels, dataset: Any, eval_by: str | None, names: Sequence[str]
) -> Verdict | None:
    """Return the verdict on the rewards of an evaluation; None, with a warning, if nothing can be compared.

    Args:
        rewards_NAK: Of the answers or steps of N rows.
        labels: Of these rows.
        dataset: Whose first N rows they are of, in order; None where that is not known.
        eval_by: Its column of labels; without one of that name, or with too many labels, no groups are compared.
        names: Of attributes. Each of a row is a ranking of its own, and they are the groups.
    """
    if not len(rewards_NAK):
        return None
    rows, attributes, answers = rewards_NAK.shape
    rewards_NK, grade_NK = (each.reshape(-1, answers) for each in (rewards_NAK.double().numpy(), labels.grade_PAK))
    groups, lengths_NK = list(names) * rows or None, None
    try:
        if labels.has_baseline:
            with_0 = np.stack([rewards_NK, 0 * rewards_NK], axis=-1)
            ordered = np.where((grade_NK > 0.5)[..., None], with_0, with_0[..., ::-1])
            return judge_pairs(ordered[~np.isnan(grade_NK) & (grade_NK != 0.5)], of="steps")
        if not isinstance(dataset, Dataset):
            if eval_by is not None:
                logger.warning("eval_by=%r is left out: it is not known which row each reward is of.", eval_by)
        else:
            if is_prepared(dataset):
                lengths = measure(dataset).lengths
                lengths_NK = (lengths.prefix_P[:, None] + lengths.tails_PK)[:rows].repeat(attributes, axis=0)
            try:
                if eval_by is not None:
                    groups = [label for label in _labels(dataset, eval_by)[:rows] for _ in range(attributes)]
                    check_groups(groups)
            except UserError as reason:  # the data of a later call; what the trainer was given has been checked
                logger.warning("The metrics are without groups. %s", reason)
                groups = None
        if labels.are_rankings:
            return judge_rankings(rewards_NK, grade_NK, lengths_NK, groups)
        if (grade_NK[:, 0] == 1).all():
            return judge_pairs(rewards_NK, lengths_NK, groups)
        # by the more probable answer; of two answers the last two measures say what the accuracy says
        verdict = judge_rankings(rewards_NK, grade_NK, lengths_NK, groups)
        return replace(verdict, top1_accuracy=None, kendall_tau=None)
    except NothingCompared:
        logger.warning(
            "The evaluation has no accuracy: no row has finite rewards of two answers of which one is labeled as "
            "better, or of a labeled step."
        )
        return None


def _labels(dataset: Dataset, column: str) -> list[str]:
    """Return the label of each row.

    Raises:
        UserError: There is no such column.
    """
    if column not in dataset.column_names:
        raise UserError(
            f"eval_by={column!r} names no column of the evaluation data, whose columns are "
            f"{', '.join(dataset.column_names)}. Name one of them, or leave it out."
        )
    return [label_of(value) for value in dataset[column]]


def check_eval_by(args: Any, eval_dataset: Any) -> None:
    """Raise UserError where evaluation is to tell groups apart that the data does not have, or has too many of."""
    if args.eval_by is None or eval_dataset is None:
        return
    if args.train_sampling_strategy == "group_by_length":
        raise UserError(
            "eval_by needs pairs in the order of the evaluation data, which train_sampling_strategy='group_by_length' "
            "changes. Leave one of them out: packed rows have no padding."
        )
    for dataset in eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]:
        if not isinstance(dataset, Dataset):
            raise UserError(
                f"eval_by={args.eval_by!r} needs evaluation data with a length, not a stream. Leave it out."
            )
        check_groups(_labels(dataset, args.eval_by))


def check_best_metric(args: Any, eval_dataset: Any) -> None:
    """Raise UserError where `metric_for_best_model` is not measured: transformers would find out hours later.

    Args:
        eval_dataset: Prepared data, or a mapping of several.
    """
    asked = args.metric_for_best_model
    if asked is None or args.eval_strategy == "no" or eval_dataset is None:
        return
    sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    known = [f"{name}_{each}" if name else each for name in sets for each in _metrics_of(args, sets[name])]
    if asked.removeprefix("eval_") not in known:
        raise UserError(
            f"metric_for_best_model={asked!r} is not measured in evaluation, which measures {', '.join(known)}. "
            "Choose one of them, or give a compute_metrics that returns it."
        )


def _metrics_of(args: Any, dataset: Any) -> list[str]:
    """Name what an evaluation measures on prepared data, as found by measuring rewards that are all equal."""
    labels = pairs_of(1)
    if is_prepared(dataset):
        most = (args.max_eval_steps or len(dataset)) * args.eval_batch_size * args.world_size
        rows = map(read_row, dataset.select(range(min(most, len(dataset)))))
        labels = Labels.of(list(rows), measure(dataset).answers, len(args.attributes or ()))
        dataset = None if args.train_sampling_strategy == "group_by_length" else dataset
    rewards_NAK = torch.zeros(labels.grade_PAK.shape)
    verdict = judge(rewards_NAK, labels, dataset, args.eval_by, args.attributes or ())
    measured = [*sums_on_host(rewards_NAK, labels, [1.0] * len(args.attributes or ())).metrics()]
    measured += [] if verdict is None else [*verdict.metrics()]
    counted = ["pairs"] if args.max_eval_steps is not None else []
    return ["loss", "num_tokens", *measured, *counted, "runtime", "samples_per_second", "steps_per_second"]
