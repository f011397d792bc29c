"""Evaluate rewards by comparisons: sums on the device and on the host, verdicts, and checks of settings."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..data.collate import ComparisonRule, Labels, compare, pairs_of
from ..data.length_stats import Prompt, group_prompts, is_prepared, kind_of_dataset, length_stats, prompts_of, rows_of
from ..errors import UserError
from ..packing.batch import Comparisons
from .verdict import BestOfN, Calibration, Distribution, LengthBias, Proportion, ScoreFit, Verdict

logger = logging.getLogger(__name__)

COUNTS = ("pairs", "comparisons", "answers")
SUMS = ("correct", "ties", "margin", "reward", "deviations")
_MAX_COMPARISONS_PER_PART = 2**19  # bounds the memory on the host
_SAMPLED_PER_RANKING = 128  # maximum comparisons of one ranking in the sample
_SAMPLE = 2**20  # comparisons in the sample
_MAX_WORST_ROWS = 10  # in a verdict
_MAX_GROUPS = 200  # a column with more labels probably identifies rows, not groups
_TIES_SUBSET = "ties"  # lower-case name of RewardBench 2's subset that has a special score


@dataclass
class RewardSums:
    """Metric sums over rows, on the host.

    Attributes:
        pairs: Number of rows. The name is that of the logged metrics.
        comparisons: Number of rows, rankings or steps that have any comparison.
        correct, ties, margin: Sums over rows, rankings or steps. Each adds the mean over its comparisons.
        reward: Sum of all answers' rewards.
        deviations: Sum of squared deviations from the mean reward. A sum of squared rewards would lose precision by
            cancellation.
    """

    pairs: int = 0
    comparisons: int = 0
    answers: int = 0
    tokens: int = 0
    correct: float = 0.0
    ties: float = 0.0
    margin: float = 0.0
    reward: float = 0.0
    deviations: float = 0.0
    lowest: float = float("inf")
    highest: float = float("-inf")

    @classmethod
    def read(cls, *sums: torch.Tensor) -> "RewardSums":
        """Create the sums from the results of `sums_of` on the host."""
        values = chain.from_iterable(part.tolist() for part in sums)
        return cls(**dict(zip((*COUNTS, *SUMS, "lowest", "highest"), values, strict=True)))

    def __add__(self, other: "RewardSums") -> "RewardSums":
        """Return the sums over the rows of both."""
        total = {name: getattr(self, name) + getattr(other, name) for name in (*COUNTS, "tokens", *SUMS)}
        mean = total["reward"] / max(total["answers"], 1)
        total["deviations"] += sum(deviations_shift(mean, sums.answers, sums.reward) for sums in (self, other))
        # numpy's minimum and maximum propagate NaN; Python's min and max ignore a NaN in second place
        lowest, highest = np.minimum(self.lowest, other.lowest), np.maximum(self.highest, other.highest)
        return RewardSums(**total, lowest=float(lowest), highest=float(highest))

    def metrics(self) -> dict[str, float]:
        """Return accuracy (ties are wrong), mean margin and tie rate, and the lowest, mean and highest reward."""
        mean = self.reward / max(self.answers, 1)
        rewards = {"min_reward": self.lowest, "mean_reward": mean, "max_reward": self.highest}
        sums = {"accuracy": self.correct, "margin": self.margin, "tie_rate": self.ties} if self.comparisons else {}
        return (rewards if self.answers else {}) | {name: total / self.comparisons for name, total in sums.items()}


def deviations_shift(mean: Any, answers: Any, reward: Any) -> Any:
    """Return the increase in the sum of squared deviations when ``mean`` replaces the rewards' own mean.

    With it, sums are merged as in Chan, Golub and LeVeque (1979, "Updating formulae and a pairwise algorithm for
    computing sample variances").

    Args:
        mean: The mean to measure deviations from.
        answers: Number of rewards.
        reward: Sum of the rewards.
    """
    return (reward - answers * mean) ** 2 / (answers + (answers == 0))


def sums_of(
    rewards_SA: torch.Tensor,
    present_S: torch.Tensor,
    table: Comparisons[torch.Tensor],
    weights: Sequence[float] = (),
    answers: Any = 0,
    reward: Any = 0.0,
) -> list[torch.Tensor]:
    """Return `COUNTS`, `SUMS`, and the lowest and highest reward [1] of the rewards in ``present_S``.

    Args:
        weights: Weight of each attribute; a reward is the weighted sum over attributes. Empty if the model has none.
        answers: Number of earlier rewards. The returned `deviations` must be added to the earlier deviations.
        reward: Sum of the earlier rewards.
    """
    present_P = present_S.unflatten(0, (-1, table.answers)).any(-1)
    stats_G4 = comparison_stats(rewards_SA, table, present_P)
    weighted = (weight * values_S for weight, values_S in zip(weights, rewards_SA.unbind(-1), strict=True))
    reward_S: Any = sum(weighted) if weights else rewards_SA.squeeze(-1)
    absent_S = ~present_S
    counts = [mask.sum(dtype=torch.int32) for mask in (present_P, stats_G4[:, 3] > 0, present_S)]
    added = reward_S.masked_fill(absent_S, 0.0).sum()
    mean = (reward + added) / (answers + counts[2]).clamp(min=1)
    deviations = (reward_S - mean).masked_fill(absent_S, 0.0).square().sum() + deviations_shift(mean, answers, reward)
    lowest_1 = reward_S.masked_fill(absent_S, float("inf")).amin(0, keepdim=True)
    highest_1 = reward_S.masked_fill(absent_S, float("-inf")).amax(0, keepdim=True)
    return [torch.stack(counts), torch.stack([*stats_G4[:, :3].sum(0), added, deviations]), lowest_1, highest_1]


def comparison_stats(
    rewards_SA: torch.Tensor, table: Comparisons[torch.Tensor], present_P: torch.Tensor
) -> torch.Tensor:
    """Return four statistics of each ranking, or of each step, [G, 4].

    They are the share of right comparisons, the share of ties, the mean margin, and the number of comparisons.
    Comparisons with probability 0.5 do not count.
    """
    better_C, worse_C = table.compared(rewards_SA)
    rankings = len(better_C) if table.kind.compares_with_zero else len(table.ranking_weight_G)
    decided_PM = (table.probability_C > 0.5).unflatten(0, (len(present_P), -1)) & present_P[:, None]
    decided_GM1 = decided_PM.view(rankings, -1, 1)
    value_C3 = torch.stack([better_C > worse_C, better_C == worse_C, better_C - worse_C], dim=-1)
    total_G3 = value_C3.view(rankings, -1, 3).masked_fill(~decided_GM1, 0.0).sum(1)
    count_G1 = decided_GM1.sum(1)
    return torch.cat([total_G3 / count_G1.clamp(min=1), count_G1], dim=-1)


def tables_on_host(labels: Labels) -> Iterator[tuple[slice, Comparisons[torch.Tensor]]]:
    """Yield slices of the rows and their comparison tables. The size of a slice is limited to bound memory."""
    rows, attributes, answers = labels.grade_PAK.shape
    count = max(1, _MAX_COMPARISONS_PER_PART // max(1, attributes * answers**2))
    for start in range(0, rows, count):
        part = slice(start, start + count)
        yield part, compare(labels.grades_of(part), ComparisonRule()).map_tensors(torch.from_numpy)


def sums_on_host(rewards_NAK: torch.Tensor, labels: Labels, weights: Sequence[float] = ()) -> RewardSums:
    """Return the sums over rewards on the host, in float64."""
    result = RewardSums()
    for part, table in tables_on_host(labels):
        rewards_SA = rewards_NAK[part].double().transpose(1, 2).flatten(0, 1)
        present_S = ~table.grade_SA.isnan().all(-1)
        result += RewardSums.read(*sums_of(rewards_SA, present_S, table, weights))
    return result


def padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Stack lists of numbers to [N, K]; shorter lists are padded with NaN."""
    filled_NK = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for filled_K, values in zip(filled_NK, rows, strict=True):
        filled_K[: len(values)] = values
    return filled_NK


def _is_finite(rewards_NK: np.ndarray, grade_NK: np.ndarray) -> np.ndarray:
    """Mark rows that have graded answers, all with rewards in the range of float32: sums of larger ones overflow."""
    within_NK = np.abs(rewards_NK) <= np.finfo(np.float32).max
    present_NK = ~np.isnan(grade_NK)
    return (within_NK | ~present_NK).all(axis=1) & present_NK.any(axis=1)


def _top1_of(rewards_NK: np.ndarray, grade_NK: np.ndarray) -> np.ndarray:
    """Return for each row the share of best-graded answers among its answers with the highest reward, [N].

    Rewards must be finite. If only one answer is best, this is RewardBench 2's credit: 1/k if it is among k answers
    with the highest reward, and 0 if it is not.
    """
    values = [np.where(np.isnan(grade_NK), -np.inf, value_NK) for value_NK in (rewards_NK, grade_NK)]
    highest_NK, best_NK = (value_NK == value_NK.max(axis=1, keepdims=True) for value_NK in values)
    return (highest_NK & best_NK).sum(axis=1) / highest_NK.sum(axis=1)


class NoComparisons(UserError):
    """No row has two finite rewards with a label that says which one should be higher."""


def evaluate_rows(
    rewards_NK: np.ndarray,
    labels: Labels,
    lengths_NK: np.ndarray | None = None,
    groups: Sequence[str | None] | None = None,
    prompts: Sequence[Prompt] | None = None,
) -> Verdict | ScoreFit:
    """Return the verdict on rows. Rows with a reward that is not finite are left out and counted.

    The comparisons of a ranking are not independent: in all means they count once together, and intervals use the
    number of rankings. Rows with the same prompt are not independent either: see `Proportion.of`. Kendall's tau is the
    number of right minus wrong comparisons, divided by the number of all (tau-a if no grades are equal,
    https://doi.org/10.1093/biomet/30.1-2.81). Counts, accuracies, the mean margin and tau use all comparisons.
    Distributions, loss, calibration, length bias and the worst rows use a random sample: at most 128 comparisons of
    each ranking (all of them, up to 16 answers), and one million if there are more than two million.

    Args:
        rewards_NK: Reward of each answer; for steps, one step per row, [N, 1].
        labels: Labels of the rows, for one attribute.
        lengths_NK: Tokens of each answer; NaN if unknown.
        groups: Group label of each row. If there are more than 200 labels, groups are dropped with a warning.
        prompts: Prompt of each row, see `group_prompts`.

    Returns:
        The verdict; a `ScoreFit` for single answers with scores that are no probabilities.

    Raises:
        NoComparisons: No row has two finite rewards with a label that says which one should be higher.
    """
    kind, grade_NK = labels.kind, labels.grade_PAK[:, 0]
    finite_rows = np.flatnonzero(_is_finite(rewards_NK, grade_NK))
    left_out = int((~np.isnan(grade_NK)).any(axis=1).sum()) - len(finite_rows)
    groups, prompts = groups or [None] * len(rewards_NK), prompts or [b""] * len(rewards_NK)
    if kind.compares_with_zero and len(finite_rows):
        score_N = grade_NK[finite_rows, 0]
        if kind.predicts_scores or not ((score_N >= 0) & (score_N <= 1)).all():
            return _score_fit(finite_rows, rewards_NK[finite_rows, 0], score_N, left_out, groups)
    lengths_NK = np.full(rewards_NK.shape, np.nan) if lengths_NK is None else lengths_NK
    result_J6, sample_M6 = _compare(rewards_NK, labels, finite_rows, lengths_NK)
    if not len(result_J6):
        raise NoComparisons(f"None of {len(rewards_NK)} {kind.unit} has two finite rewards, one labeled as better.")
    row_J, right_J, tied_J, margin_J, count_J, top1_J = result_J6.T
    row_M, better_M, worse_M, longer_M, weight_M, _ = sample_M6.T
    margin_M = better_M - worse_M
    prompt_N = group_prompts(prompts)
    units_2J, units_2M = (np.stack([rows, prompt_N[rows]]) for rows in (row_J.astype(int), row_M.astype(int)))

    def share(values_J: np.ndarray, mask_J: Any = slice(None)) -> Proportion:
        return Proportion.of(values_J[mask_J], np.ones(len(row_J))[mask_J], units_2J[:, mask_J])

    # one of the two is always 0 if each reward is compared with 0
    rewards = better_M + worse_M if kind.compares_with_zero else np.stack([better_M, worse_M], axis=-1).ravel()
    shares = {name: share(right_J, places) for name, places in _places_by_group(groups, units_2J[0]).items()}
    worst_first = [at for at in np.argsort(margin_M, kind="stable") if margin_M[at] <= 0][:_MAX_WORST_ROWS]
    return Verdict(
        pairs=round(count_J.sum()),
        left_out=left_out,
        accuracy=share(right_J),
        ties=round(tied_J @ count_J),
        pairwise_loss=float(np.average(np.logaddexp(0.0, -margin_M), weights=weight_M)),
        margins=replace(Distribution.of(margin_M, weight_M), mean=float(margin_J.mean())),
        rewards=Distribution.of(rewards, weight_M.repeat(len(rewards) // len(weight_M))),
        calibration=Calibration.of(margin_M, weight_M),
        length=None if np.isnan(longer_M).any() else LengthBias.of(margin_M > 0, longer_M, weight_M, units_2M),
        groups=shares,
        mean_over_groups=_mean_of(shares),
        worst=tuple(dict.fromkeys(units_2M[0, worst_first].tolist())),
        top1_accuracy=share(top1_J) if kind.orders_answers else None,
        kendall_tau=float((2 * right_J + tied_J - 1).mean()) if kind.orders_answers else None,
        of=kind.unit,
        prompts=len(np.unique(units_2J[1])) if any(prompts) else None,
    )


def _compare(
    rewards_NK: np.ndarray, labels: Labels, finite_rows: np.ndarray, lengths_NK: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of rows with comparisons, and a sample of all comparisons.

    Returns:
        Row, `comparison_stats`, and top-1 accuracy, [J, 6]. Row, both rewards, length difference, weight, and a random
        sort key of the sampled comparisons, [M, 6].
    """
    results, samples = [np.zeros((0, 6))], [np.zeros((0, 6))]
    chooser, thinner = np.random.default_rng(0), np.random.default_rng(1)
    for part, table in tables_on_host(labels.grades_of(finite_rows)):
        row_J = finite_rows[part]
        rewards_JK = rewards_NK[row_J]
        rewards_S1 = torch.from_numpy(np.nan_to_num(rewards_JK)).double().reshape(-1, 1)
        stats_J4 = comparison_stats(rewards_S1, table, torch.ones(len(row_J), dtype=torch.bool)).numpy()
        top1_J = _top1_of(rewards_JK, labels.grade_PAK[row_J, 0])
        results.append(np.column_stack([row_J, stats_J4, top1_J])[stats_J4[:, 3] > 0])
        lengths_S1 = torch.from_numpy(lengths_NK[row_J]).double().reshape(-1, 1)
        place_J, *columns = _draw(rewards_S1, lengths_S1, table, chooser)
        samples.append(np.column_stack([row_J[place_J], *columns, thinner.random(len(place_J))]))
        if sum(map(len, samples)) > 2 * _SAMPLE:
            sample_M6 = np.concatenate(samples)
            samples = [sample_M6[np.argsort(sample_M6[:, -1])[:_SAMPLE]]]
    return np.concatenate(results), np.concatenate(samples)


def _draw(
    rewards_S1: torch.Tensor, lengths_S1: torch.Tensor, table: Comparisons[torch.Tensor], chooser: np.random.Generator
) -> list[np.ndarray]:
    """Draw comparisons of each ranking; return their ranking, both rewards, length difference and weight, [M] each."""
    decided_M = torch.nonzero(table.probability_C > 0.5)[:, 0].numpy()
    ranking_M = decided_M // (len(table.weight_C) // len(table.row_weight_P))
    mixed_M = chooser.permutation(len(decided_M))
    by_ranking_M = mixed_M[np.argsort(ranking_M[mixed_M], kind="stable")]
    place_M = np.arange(len(ranking_M)) - np.searchsorted(ranking_M, ranking_M)
    drawn = np.sort(by_ranking_M[place_M < _SAMPLED_PER_RANKING])
    rewards, (better_C, worse_C) = table.compared(rewards_S1), table.compared(lengths_S1)
    better_M, worse_M, longer_M = (column_C.numpy()[decided_M[drawn]] for column_C in (*rewards, better_C - worse_C))
    ranking_M = ranking_M[drawn]
    return [ranking_M, better_M, worse_M, longer_M, 1 / np.bincount(ranking_M)[ranking_M]]


def _score_fit(
    row_N: np.ndarray, reward_N: np.ndarray, score_N: np.ndarray, left_out: int, groups: Sequence[str | None]
) -> ScoreFit:
    """Return the verdict on rewards that predict scores."""
    error_N = (reward_N - score_N) ** 2
    is_constant = np.ptp(reward_N) == 0 or np.ptp(score_N) == 0
    return ScoreFit(
        answers=len(row_N),
        left_out=left_out,
        squared_error=float(error_N.mean()),
        variance=float(score_N.var()),
        correlation=np.nan if is_constant else float(np.corrcoef(reward_N, score_N)[0, 1]),
        rewards=Distribution.of(reward_N, np.ones(len(row_N))),
        groups={name: float(error_N[places].mean()) for name, places in _places_by_group(groups, row_N).items()},
        worst=tuple(row_N[np.argsort(-error_N, kind="stable")[:_MAX_WORST_ROWS]].tolist()),
    )


def label_of(value: Any) -> str:
    """Return the name of a row's group, given the row's value in the grouping column."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _places_by_group(groups: Sequence[str | None], row_J: np.ndarray) -> dict[str, list[int]]:
    """Return the places in ``row_J`` of each group's rows; warn and return none if there are too many groups."""
    places: dict[str | None, list[int]] = {}
    for place, row in enumerate(row_J.tolist()):
        places.setdefault(groups[row], []).append(place)
    names = sorted(name for name in places if name is not None)
    if len(names) > _MAX_GROUPS:
        logger.warning(f"{len(names)} groups, such as {names[0]!r}, are not compared: the maximum is {_MAX_GROUPS}.")
        return {}
    return {name: places[name] for name in names}


def _mean_of(groups: Mapping[str, Proportion]) -> float | None:
    """Return the mean over groups, with equal weights for groups of any size; None without groups."""
    return float(np.mean([share.value for share in groups.values()])) if groups else None


def evaluate_best_of_n(
    rewards_NK: np.ndarray,
    grade_NK: np.ndarray,
    ids: Sequence[str],
    groups: Sequence[str | None] | None = None,
    prompts: Sequence[Prompt] | None = None,
) -> BestOfN:
    """Evaluate rows that have right and wrong answers. Right answers have the row's highest grade.

    Args:
        rewards_NK: Reward of each answer.
        grade_NK: Grade of each answer; NaN after the last answer of a row.
        ids: Id of each row; in RewardBench 2's subset Ties ``ref:NUMBER`` or ``tied:NUMBER``.
        groups: The subset of each row.
        prompts: The prompt of each row, see `group_prompts`.

    Raises:
        UserError: No row has only finite rewards, or rows of the subset Ties do not fit its rule.
    """
    finite = np.flatnonzero(_is_finite(rewards_NK, grade_NK))
    if not len(finite):
        raise UserError(f"None of {len(ids)} rows has only finite rewards: there is nothing to evaluate.")
    credit_N = _top1_of(rewards_NK[finite], grade_NK[finite])
    is_right_NK = grade_NK[finite] == np.nanmax(grade_NK[finite], axis=1, keepdims=True)
    right_NK, wrong_NK = (np.where(mask_NK, rewards_NK[finite], np.nan) for mask_NK in (is_right_NK, ~is_right_NK))
    gap_N = np.nanmax(right_NK, axis=1) - np.nanmax(wrong_NK, axis=1)
    units_2N = np.stack([finite, group_prompts(prompts or [b""] * len(ids))[finite]])
    scores = {}
    for name, here in _places_by_group(groups or [None] * len(ids), finite).items():
        scores[name] = Proportion.of(credit_N[here], np.ones(len(here)), units_2N[:, here])
        if name.lower() == _TIES_SUBSET:
            score = ties_score(right_NK[here], wrong_NK[here], [ids[row] for row in finite[here].tolist()])
            scores[name] = Proportion(score, float("nan"), float("nan"), len(here))
    return BestOfN(
        rows=len(finite),
        left_out=len(ids) - len(finite),
        accuracy=Proportion.of(credit_N, np.ones(len(finite)), units_2N),
        groups=scores,
        mean_over_groups=_mean_of(scores),
        worst=tuple([int(finite[at]) for at in np.argsort(gap_N, kind="stable") if gap_N[at] <= 0][:_MAX_WORST_ROWS]),
    )


def ties_score(right_NK: np.ndarray, wrong_NK: np.ndarray, ids: Sequence[str]) -> float:
    """Return RewardBench 2's score of its subset Ties: questions with several right answers.

    Every question is asked twice: as ``tied:NUMBER`` with several right answers, and as ``ref:NUMBER`` with one. The
    ``gap`` of a row is its lowest right reward minus its highest wrong reward; a row is right if its gap is positive.
    The ``spread`` of a question is the highest minus the lowest right reward of its tied row. The score is

        0.3 * share of tied rows that are right + 0.3 * share of ref rows that are right
        + 0.2 * share of questions with tied gap > spread
        + 0.2 * share of questions with min(tied gap, ref gap) > spread
        + 0.01 * mean of tanh(min(tied gap, ref gap) / spread - 1), with 0 / 0 = 0

    Args:
        right_NK: Rewards of right answers, NaN elsewhere.
        wrong_NK: Rewards of wrong answers, NaN elsewhere.
        ids: Ids of the rows.

    Raises:
        UserError: An id has another form, a tied row has only one right answer, or no question is asked both ways.
    """
    gaps = dict(zip(ids, np.nanmin(right_NK, axis=1) - np.nanmax(wrong_NK, axis=1), strict=True))
    row_of = {id_: row for row, id_ in enumerate(ids)}
    tied, ref = ({id_ for id_ in ids if id_.startswith(kind)} for kind in ("tied:", "ref:"))
    both_ways = sorted(id_ for id_ in tied if id_.replace("tied", "ref", 1) in ref)
    right_QK = right_NK[[row_of[id_] for id_ in both_ways]]
    if len(tied) + len(ref) < len(ids) or not both_ways or ((~np.isnan(right_QK)).sum(axis=1) < 2).any():
        raise UserError(
            "RewardBench 2's rule for its subset Ties needs unique ids, `ref:NUMBER`, or `tied:NUMBER` with at least "
            "two right answers, and a question asked both ways. Correct the ids, or rename the subset."
        )
    spread_Q = np.nanmax(right_QK, axis=1) - np.nanmin(right_QK, axis=1)
    tied_Q = np.array([gaps[id_] for id_ in both_ways])
    smaller_Q = np.minimum(tied_Q, [gaps[id_.replace("tied", "ref", 1)] for id_ in both_ways])
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond_Q = np.nan_to_num(np.tanh(smaller_Q / spread_Q - 1), nan=0.0)
    right_shares = [np.mean([gaps[id_] > 0 for id_ in kind]) for kind in (tied, ref)]
    above_spread = [np.mean(gap_Q > spread_Q) for gap_Q in (tied_Q, smaller_Q)]
    return float(0.3 * sum(right_shares) + 0.2 * sum(above_spread) + 0.01 * np.mean(beyond_Q))


def evaluate_rewards(rewards_NAK: torch.Tensor, labels: Labels, dataset: Any, args: Any) -> Verdict | ScoreFit | None:
    """Return the verdict on the rewards of an evaluation; warn and return None if nothing can be compared.

    Args:
        rewards_NAK: Rewards of the answers or steps of N rows.
        labels: Labels of the rows.
        dataset: The dataset that starts with these N rows, in order; None if unknown.
        args: The training arguments. `eval_by` is the dataset's column of group labels; it is ignored with a warning
            if it is missing. Each of the `attributes` of a row is a separate ranking, and they are the default groups.
    """
    if not len(rewards_NAK):
        return None
    rows, attributes, answers = rewards_NAK.shape
    shape = (-1, 1 if labels.kind.compares_with_zero else answers)  # each step becomes one row
    rewards_NK, grade_NK = (np.asarray(values).reshape(shape) for values in (rewards_NAK.double(), labels.grade_PAK))
    groups, lengths_NK, prompts = list(args.attributes or ()) * rows or None, None, None
    per_row = len(rewards_NK) // rows  # attributes, or steps
    if isinstance(dataset, Dataset):
        prompts = [prompt for prompt in islice(prompts_of(dataset), rows) for _ in range(per_row)]
        if is_prepared(dataset) and not labels.kind.compares_with_zero:
            lengths = length_stats(dataset).lengths
            lengths_NK = (lengths.prefix_N[:, None] + lengths.tails_NK)[:rows].repeat(attributes, axis=0)
    if isinstance(dataset, Dataset) and args.eval_by in dataset.column_names:
        groups = [label_of(label) for label in dataset[args.eval_by][:rows] for _ in range(per_row)]
    elif args.eval_by is not None:
        fault = "the data has no such column, or the order of its rows is unknown"
        logger.warning(f"eval_by={args.eval_by!r} is ignored: {fault}.")
    try:
        verdict = evaluate_rows(rewards_NK, replace(labels, grade_PAK=grade_NK[:, None]), lengths_NK, groups, prompts)
        worst = tuple(dict.fromkeys(item * rows // len(rewards_NK) for item in verdict.worst))  # rows of the data
        return replace(verdict, worst=worst)
    except NoComparisons as reason:
        logger.warning("The evaluation has no accuracy. %s", reason)
        return None


def check_eval_by(column: str, eval_dataset: Any) -> None:
    """Raise UserError if evaluation data is a stream or has no column `eval_by`: hours later, it would be ignored."""
    sets = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
    for dataset in sets:
        if dataset is not None and (not isinstance(dataset, Dataset) or column not in dataset.column_names):
            raise UserError(f"eval_by={column!r} needs evaluation data with this column, not a stream. Leave it out.")


def check_best_metric(args: Any, eval_dataset: Any) -> None:
    """Raise UserError if evaluation does not compute `metric_for_best_model`; transformers would raise hours later.

    Args:
        args: The training arguments.
        eval_dataset: A prepared dataset, or a mapping of several.
    """
    asked = args.metric_for_best_model
    if asked is None or args.eval_strategy == "no" or eval_dataset is None:
        return
    sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    metrics = [f"{name}_{metric}" if name else metric for name in sets for metric in _metric_names(args, sets[name])]
    if asked.removeprefix("eval_") not in metrics:
        raise UserError(
            f"metric_for_best_model={asked!r} is not a metric of the evaluation. Choose one of {', '.join(metrics)}."
        )


def _metric_names(args: Any, dataset: Any) -> list[str]:
    """Return the names of an evaluation's metrics, by evaluating prepared data with some rewards."""
    labels = pairs_of(1)
    if is_prepared(dataset):
        most = (args.max_eval_steps or len(dataset)) * args.eval_batch_size * args.world_size
        rows = list(rows_of(dataset.select(range(min(most, len(dataset))))))
        kind = kind_of_dataset(dataset).of(args)
        labels = Labels.of(rows, kind, length_stats(dataset).answers, len(args.attributes or ()))
        dataset = None if args.train_sampling_strategy == "group_by_length" else dataset
    rewards_NAK = torch.arange(labels.grade_PAK.size).view(labels.grade_PAK.shape).float()  # a correlation needs two
    verdict = evaluate_rewards(rewards_NAK, labels, dataset, args)
    measured = [*sums_on_host(rewards_NAK, labels, [1.0] * len(args.attributes or ())).metrics()]
    measured += [] if verdict is None else [*verdict.metrics()]
    counted = ["pairs"] if args.max_eval_steps is not None else []
    return ["loss", "num_tokens", *measured, *counted, "runtime", "samples_per_second", "steps_per_second"]
