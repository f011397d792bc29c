"""Judge rewards by comparisons: sums on the device and on the host, verdicts, and checks of what they need."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..data.collate import ComparisonRule, Labels, compare, pairs_of
from ..data.length_stats import is_prepared, length_stats, rows_of
from ..errors import UserError
from ..packing.batch import POINTWISE_KINDS, Comparisons, Kind
from .verdict import (
    MOST_GROUPS,
    BestOfN,
    Proportion,
    Verdict,
    calibration_of,
    check_groups,
    distribution_of,
    label_of,
    length_bias_of,
    mean_of,
    proportion,
)

logger = logging.getLogger(__name__)

COUNTS = ("pairs", "comparisons", "answers")
SUMS = ("correct", "ties", "margin", "reward", "deviations")
_AT_ONCE = 2**19  # comparisons on the host, which bounds its memory
_OF_A_RANKING = 128  # comparisons of a ranking that are in the sample
_SAMPLE = 2**20  # comparisons in the sample
_WORST = 10  # rows that a verdict names, at most
_TIES_SUBSET = "ties"  # name of RewardBench 2's subset with a rule of its own, in any case


@dataclass
class RewardSums:
    """Sums over pairs, rankings or steps, on the host.

    Attributes:
        pairs: Pairs, or prompts of rankings or steps.
        comparisons: Pairs, rankings or steps that have any comparison.
        correct, ties, margin: Sums of each one's mean over its comparisons.
        reward: Sum of all answers' rewards.
        deviations: Squared deviations of rewards from their mean, summed: a sum of squares about 0 would cancel.
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
    def read(
        cls, counts: torch.Tensor, sums: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor
    ) -> "RewardSums":
        """Read what `sums_of` returned, on the host."""
        named = zip((*COUNTS, *SUMS), [*counts.tolist(), *sums.tolist()], strict=True)
        return cls(**dict(named), lowest=lowest.item(), highest=highest.item())

    @classmethod
    def of_saved(cls, sums: Mapping[str, Any]) -> "RewardSums":
        """Read sums that a checkpoint holds: older ones knew only pairs, and squares about 0."""
        found = {"comparisons": sums["pairs"], "answers": 2 * sums["pairs"], **sums}
        if "squares" in found:
            found["deviations"] = max(found.pop("squares") - sums["reward"] ** 2 / max(found["answers"], 1), 0.0)
        return cls(**found)

    def __add__(self, other: "RewardSums") -> "RewardSums":
        """Return the sums over both sets of pairs."""
        added = {name: getattr(self, name) + getattr(other, name) for name in (*COUNTS, "tokens", *SUMS)}
        mean = added["reward"] / max(added["answers"], 1)
        added["deviations"] += sum(apart_from(mean, each.answers, each.reward) for each in (self, other))
        # numpy's keep NaN, which Python's leave out where it comes second
        lowest, highest = np.minimum(self.lowest, other.lowest), np.maximum(self.highest, other.highest)
        return RewardSums(**added, lowest=float(lowest), highest=float(highest))

    def metrics(self) -> dict[str, float]:
        """Return means: strict accuracy (better > worse), margin, ties, rewards; extremes of rewards."""
        mean = self.reward / max(self.answers, 1)
        rewards = {"min_reward": self.lowest, "mean_reward": mean, "max_reward": self.highest}
        sums = {"accuracy": self.correct, "margin": self.margin, "tie_rate": self.ties} if self.comparisons else {}
        return (rewards if self.answers else {}) | {name: each / self.comparisons for name, each in sums.items()}


def apart_from(mean: Any, answers: Any, reward: Any) -> Any:
    """Return what the squared deviations of rewards from their own mean gain when taken from another mean.

    So sums are joined by Chan, Golub and LeVeque (1979, "Updating formulae and a pairwise algorithm for computing
    sample variances").
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
    """Return `COUNTS`, `SUMS`, and the lowest and highest reward [1], over the rewards that ``present_S`` keeps.

    Args:
        weights: Of several attributes, whose weighted sums are the rewards.
        answers: Number of earlier rewards. `deviations` is what the new ones add to those from the mean of all.
        reward: Sum of the earlier rewards.
    """
    present_P = present_S.unflatten(0, (-1, table.answers)).any(-1)
    order_G4 = order_of(rewards_SA, table, present_P)
    weighted = (weight * values_S for weight, values_S in zip(weights, rewards_SA.unbind(-1), strict=True))
    reward_S: Any = sum(weighted) if weights else rewards_SA.squeeze(-1)
    absent_S = ~present_S
    counts = [each.sum(dtype=torch.int32) for each in (present_P, order_G4[:, 3] > 0, present_S)]
    added = reward_S.masked_fill(absent_S, 0.0).sum()
    mean = (reward + added) / (answers + counts[2]).clamp(min=1)
    deviations = (reward_S - mean).masked_fill(absent_S, 0.0).square().sum() + apart_from(mean, answers, reward)
    lowest_1 = reward_S.masked_fill(absent_S, float("inf")).amin(0, keepdim=True)
    highest_1 = reward_S.masked_fill(absent_S, float("-inf")).amax(0, keepdim=True)
    return [torch.stack(counts), torch.stack([*order_G4[:, :3].sum(0), added, deviations]), lowest_1, highest_1]


def order_of(rewards_SA: torch.Tensor, table: Comparisons[torch.Tensor], present_P: torch.Tensor) -> torch.Tensor:
    """Return four numbers of each ranking, or of each step, [G, 4].

    They are the shares of right comparisons and of ties, the mean margin, and the number of comparisons. A comparison
    with probability 0.5 does not count.
    """
    better_C, worse_C = table.compared(rewards_SA)
    rankings = len(better_C) if table.kind == "steps" else len(table.ranking_weight_G)
    decided_PM = (table.probability_C > 0.5).unflatten(0, (len(present_P), -1)) & present_P[:, None]
    decided_GM1 = decided_PM.view(rankings, -1, 1)
    value_C3 = torch.stack([better_C > worse_C, better_C == worse_C, better_C - worse_C], dim=-1)
    total_G3 = value_C3.view(rankings, -1, 3).masked_fill(~decided_GM1, 0.0).sum(1)
    count_G1 = decided_GM1.sum(1)
    return torch.cat([total_G3 / count_G1.clamp(min=1), count_G1], dim=-1)


def tables_on_host(labels: Labels) -> Iterator[tuple[slice, Comparisons[torch.Tensor]]]:
    """Yield parts of the rows, and their tables: of so many comparisons that memory is bounded."""
    rows, attributes, answers = labels.grade_PAK.shape
    count = max(1, _AT_ONCE // max(1, attributes * answers**2))
    for start in range(0, rows, count):
        part = slice(start, start + count)
        yield part, compare(labels.grades_of(part), ComparisonRule()).map_tensors(torch.from_numpy)


def sums_on_host(rewards_NAK: torch.Tensor, labels: Labels, weights: Sequence[float] = ()) -> RewardSums:
    """Return the sums over host rewards of rows with these labels, in float64."""
    result = RewardSums()
    for part, table in tables_on_host(labels):
        rewards_SA = rewards_NAK[part].double().transpose(1, 2).flatten(0, 1)
        present_S = ~table.grade_SA.isnan().all(-1)
        result += RewardSums.read(*sums_of(rewards_SA, present_S, table, weights))
    return result


def padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return lists of numbers as [N, K], with NaN after the end of the shorter ones."""
    filled_NK = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for filled_K, values in zip(filled_NK, rows, strict=True):
        filled_K[: len(values)] = values
    return filled_NK


def _is_finite(rewards_NK: np.ndarray, grade_NK: np.ndarray) -> np.ndarray:
    """Tell which rows have graded answers, each with a reward that is finite in float32: larger sums overflow."""
    within_NK = np.abs(rewards_NK) <= np.finfo(np.float32).max
    present_NK = ~np.isnan(grade_NK)
    finite_N: np.ndarray = (within_NK | ~present_NK).all(axis=1) & present_NK.any(axis=1)
    return finite_N


def _top1_of(rewards_NK: np.ndarray, grade_NK: np.ndarray) -> np.ndarray:
    """Return the share of best-graded answers among those of each row with the highest (finite) reward, [N].

    With one best answer among k that share the highest reward it is RewardBench 2's 1/k, and 0 if it is none of them.
    """
    values = [np.where(np.isnan(grade_NK), -np.inf, each_NK) for each_NK in (rewards_NK, grade_NK)]
    highest_NK, best_NK = (each_NK == each_NK.max(axis=1, keepdims=True) for each_NK in values)
    credit_N: np.ndarray = (highest_NK & best_NK).sum(axis=1) / highest_NK.sum(axis=1)
    return credit_N


class NothingCompared(UserError):
    """No row has two rewards of which one should be higher."""


class Evaluation:
    """The verdict on rows that are added part by part, in memory that does not grow with their number.

    A ranking's comparisons are not independent, so they count once together in all means, and intervals count
    rankings. Kendall's tau is how many comparisons are right less how many are wrong, of all (tau-a where no grades
    are equal, https://doi.org/10.1093/biomet/30.1-2.81). These are sums over all comparisons. Distributions, loss,
    calibration, length bias and the worst rows are those of a random sample: at most 128 comparisons of each ranking
    (all, up to 16 answers), and, of more than two million, one million.
    """

    def __init__(self) -> None:
        self._rows = self._left_out = 0
        self._kind: Kind = "pairs"
        self._sums = np.zeros(7)
        self._group_sums, self._group_counts = Counter[str](), Counter[str]()
        self._sample: list[np.ndarray] = []
        self._chooser, self._thinner = np.random.default_rng(0), np.random.default_rng(1)

    def add(
        self,
        rewards_NK: np.ndarray,
        labels: Labels,
        lengths_NK: np.ndarray | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        """Add rows; those with a reward that is not finite are left out, and counted.

        Args:
            rewards_NK: Of each answer; of steps one a row, [N, 1].
            labels: Of one attribute.
            lengths_NK: Tokens of each answer; NaN where they are not known.
            groups: Label of each row. More than `MOST_GROUPS` name rows, and are dropped.
        """
        grade_NK = labels.grade_PAK[:, 0]
        judged = np.flatnonzero(_is_finite(rewards_NK, grade_NK))
        self._left_out += int((~np.isnan(grade_NK)).any(axis=1).sum()) - len(judged)
        self._kind = labels.kind
        for part, table in tables_on_host(labels.grades_of(judged)):
            row_J = judged[part]
            rewards_S1 = torch.from_numpy(np.nan_to_num(rewards_NK[row_J])).double().reshape(-1, 1)
            order_J4 = order_of(rewards_S1, table, torch.ones(len(row_J), dtype=torch.bool)).numpy()
            has_any_J = order_J4[:, 3] > 0
            right_J, tied_J, margin_J, count_J = order_J4[has_any_J].T
            top1_J = _top1_of(rewards_NK[row_J], grade_NK[row_J])[has_any_J]
            sums = (right_J, tied_J * count_J, margin_J, count_J, top1_J, 2 * right_J + tied_J - 1)
            self._sums += [len(right_J), *(each.sum() for each in sums)]
            if groups is not None and len(self._group_counts) <= MOST_GROUPS:
                names = [groups[row] for row in row_J[has_any_J].tolist()]
                self._group_counts.update(names)
                for name, right in zip(names, right_J.tolist(), strict=True):
                    self._group_sums[name] += right
            self._draw(rewards_S1, table, row_J, lengths_NK)
        self._rows += len(rewards_NK)

    def _draw(
        self, rewards_S1: torch.Tensor, table: Comparisons[torch.Tensor], row_J: np.ndarray, lengths_NK: Any
    ) -> None:
        """Add comparisons to the sample: row, both rewards, difference in length, weight, and a random number."""
        decided_M = torch.nonzero(table.probability_C > 0.5)[:, 0].numpy()
        ranking_M = decided_M // (len(table.weight_C) // len(row_J))
        mixed_M = self._chooser.permutation(len(decided_M))
        by_ranking_M = mixed_M[np.argsort(ranking_M[mixed_M], kind="stable")]
        place_M = np.arange(len(ranking_M)) - np.searchsorted(ranking_M, ranking_M)
        drawn = np.sort(by_ranking_M[place_M < _OF_A_RANKING])
        longer_M = np.full(len(drawn), np.nan)
        if lengths_NK is not None:
            better_M, worse_M = (each.numpy()[decided_M][drawn] for each in (table.better_C, table.worse_C))
            lengths = lengths_NK[row_J].ravel()
            longer_M = lengths[better_M] - lengths[worse_M]
        rewards = [each.numpy()[decided_M][drawn] for each in table.compared(rewards_S1)]
        ranking_M = ranking_M[drawn]
        weight_M, key_M = 1 / np.bincount(ranking_M)[ranking_M], self._thinner.random(len(drawn))
        row_M = row_J[ranking_M] + self._rows
        self._sample.append(np.column_stack([row_M, *rewards, longer_M, weight_M, key_M]))
        if sum(map(len, self._sample)) > 2 * _SAMPLE:
            every_M6 = np.concatenate(self._sample)
            self._sample = [every_M6[np.argsort(every_M6[:, -1])[:_SAMPLE]]]

    def verdict(self) -> Verdict:
        """Return the verdict on all rows so far.

        Raises:
            NothingCompared: No row has finite rewards of which one should be higher.
        """
        rankings, right, ties, margin, pairs, top1, tau = self._sums.tolist()
        of = self._kind if self._kind in POINTWISE_KINDS else "pairs"
        if not pairs:
            raise NothingCompared(
                f"None of {self._rows} {of} has two finite rewards of which one is labeled as better, so "
                "nothing can be said."
            )
        row_M, better_M, worse_M, longer_M, weight_M, _ = np.concatenate(self._sample).T
        margin_M = better_M - worse_M
        rewards = np.stack([better_M, worse_M], axis=-1).ravel()
        if of in POINTWISE_KINDS:
            rewards = better_M + worse_M  # one of them is the constant 0
        names = sorted(self._group_counts) if len(self._group_counts) <= MOST_GROUPS else []
        groups = {name: proportion(self._group_sums[name], self._group_counts[name]) for name in names}
        worst_first = [at for at in np.argsort(margin_M, kind="stable") if margin_M[at] <= 0][:_WORST]
        return Verdict(
            pairs=round(pairs),
            left_out=self._left_out,
            accuracy=proportion(right, rankings),
            ties=round(ties),
            loss=float(np.average(np.logaddexp(0.0, -margin_M), weights=weight_M)),
            margins=replace(distribution_of(margin_M, weight_M), mean=margin / rankings),
            rewards=distribution_of(rewards, weight_M.repeat(len(rewards) // len(weight_M))),
            calibration=calibration_of(margin_M, weight_M),
            length=None if np.isnan(longer_M).any() else length_bias_of(margin_M > 0, longer_M, weight_M),
            groups=groups,
            mean_over_groups=mean_of(groups),
            worst=tuple(dict.fromkeys(int(row_M[at]) for at in worst_first)),
            top1_accuracy=proportion(top1, rankings) if self._kind == "rankings" else None,
            kendall_tau=tau / rankings if self._kind == "rankings" else None,
            of=of,
        )


def evaluate_rows(
    rewards_NK: np.ndarray,
    labels: Labels,
    lengths_NK: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> Verdict:
    """Return the verdict on rows that are all at hand; arguments and errors are those of `Evaluation`."""
    evaluation = Evaluation()
    evaluation.add(rewards_NK, labels, lengths_NK, groups)
    return evaluation.verdict()


def evaluate_best_of_n(
    rewards_NK: np.ndarray,
    grade_NK: np.ndarray,
    ids: Sequence[str],
    groups: Sequence[str] | None = None,
) -> BestOfN:
    """Judge rows of right answers, which have the highest grade, and wrong ones.

    Args:
        rewards_NK: Of each answer.
        grade_NK: NaN where a row has no answer.
        ids: In RewardBench 2's subset Ties ``ref:NUMBER`` or ``tied:NUMBER``.
        groups: The subset of each row.

    Raises:
        UserError: No row has finite rewards only, or the rows of a subset Ties are not as its rule needs them.
    """
    kept = np.flatnonzero(_is_finite(rewards_NK, grade_NK))
    if not len(kept):
        raise UserError(f"None of {len(ids)} rows has finite rewards for all of its answers, so nothing can be said.")
    credit_N = _top1_of(rewards_NK[kept], grade_NK[kept])
    is_right_NK = grade_NK[kept] == np.nanmax(grade_NK[kept], axis=1, keepdims=True)
    right_NK, wrong_NK = (np.where(each, rewards_NK[kept], np.nan) for each in (is_right_NK, ~is_right_NK))
    gap_N = np.nanmax(right_NK, axis=1) - np.nanmax(wrong_NK, axis=1)
    names_N = np.array([] if groups is None else [groups[row] for row in kept.tolist()], dtype=object)
    scores = {}
    for name in sorted(set(names_N)):
        here = np.flatnonzero(names_N == name)
        scores[name] = proportion(float(credit_N[here].sum()), len(here))
        if name.lower() == _TIES_SUBSET:
            score = ties_score(right_NK[here], wrong_NK[here], [ids[row] for row in kept[here].tolist()])
            scores[name] = Proportion(score, float("nan"), float("nan"), len(here))
    return BestOfN(
        rows=len(kept),
        left_out=len(ids) - len(kept),
        accuracy=proportion(float(credit_N.sum()), len(kept)),
        groups=scores,
        mean_over_groups=mean_of(scores),
        worst=tuple([int(kept[at]) for at in np.argsort(gap_N, kind="stable") if gap_N[at] <= 0][:_WORST]),
    )


def ties_score(right_NK: np.ndarray, wrong_NK: np.ndarray, ids: Sequence[str]) -> float:
    """Return RewardBench 2's score of its subset Ties, whose questions have several right answers.

    Every question is asked twice: as ``tied:NUMBER`` with several right answers, and as ``ref:NUMBER`` with one. A row
    is right if all its right answers are above all wrong ones; ``gap`` is by how much, ``spread`` how far the right
    ones are from each other. The score is

        0.3 * share of tied rows that are right + 0.3 * share of ref rows that are right
        + 0.2 * share of questions with gap of tied > spread + 0.2 * with the smaller gap of tied and ref > spread
        + 0.01 * mean of tanh(smaller gap / spread - 1), where 0 / 0 is 0

    Args:
        right_NK: Rewards of right answers, NaN elsewhere.
        wrong_NK: Rewards of wrong answers, NaN elsewhere.
        ids: Of the rows.

    Raises:
        UserError: An id of another form, a tied row with one right answer, or no question that is asked both ways.
    """
    gaps = dict(zip(ids, np.nanmin(right_NK, axis=1) - np.nanmax(wrong_NK, axis=1), strict=True))
    row_of = {id_: row for row, id_ in enumerate(ids)}
    tied, ref = ({id_ for id_ in ids if id_.startswith(kind)} for kind in ("tied:", "ref:"))
    both_ways = sorted(id_ for id_ in tied if id_.replace("tied", "ref", 1) in ref)
    right_QK = right_NK[[row_of[id_] for id_ in both_ways]]
    if len(tied) + len(ref) < len(ids) or not both_ways or ((~np.isnan(right_QK)).sum(axis=1) < 2).any():
        raise UserError(
            "RewardBench 2's rule for its subset Ties needs an `id` of each row, once: `ref:NUMBER`, or `tied:NUMBER` "
            "with two right answers or more, and questions that are asked both ways. Give whole questions with such "
            "ids, or the subset another name."
        )
    spread_Q = np.nanmax(right_QK, axis=1) - np.nanmin(right_QK, axis=1)
    tied_Q = np.array([gaps[id_] for id_ in both_ways])
    smaller_Q = np.minimum(tied_Q, [gaps[id_.replace("tied", "ref", 1)] for id_ in both_ways])
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond_Q = np.nan_to_num(np.tanh(smaller_Q / spread_Q - 1), nan=0.0)
    right_shares = [np.mean([gaps[id_] > 0 for id_ in kind]) for kind in (tied, ref)]
    above_spread = [np.mean(gap_Q > spread_Q) for gap_Q in (tied_Q, smaller_Q)]
    return float(0.3 * sum(right_shares) + 0.2 * sum(above_spread) + 0.01 * np.mean(beyond_Q))


def evaluate_rewards(
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
    shape = (-1, 1) if labels.kind == "steps" else (-1, answers)  # each step is compared by itself
    rewards_NK, grade_NK = (np.asarray(each).reshape(shape) for each in (rewards_NAK.double(), labels.grade_PAK))
    groups, lengths_NK = list(names) * rows or None, None
    if isinstance(dataset, Dataset) and labels.kind != "steps":
        if is_prepared(dataset) and labels.kind != "answers":
            lengths = length_stats(dataset).lengths
            lengths_NK = (lengths.prefix_P[:, None] + lengths.tails_PK)[:rows].repeat(attributes, axis=0)
        try:
            if eval_by is not None:
                groups = [label for label in _labels(dataset, eval_by)[:rows] for _ in range(attributes)]
                check_groups(groups)
        except UserError as reason:  # the data of a later call; what the trainer was given has been checked
            logger.warning("The metrics are without groups. %s", reason)
            groups = None
    elif eval_by is not None and labels.kind != "steps":
        logger.warning("eval_by=%r is left out: it is not known which row each reward is of.", eval_by)
    try:
        return evaluate_rows(rewards_NK, replace(labels, grade_PAK=grade_NK[:, None]), lengths_NK, groups)
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
        rows = list(rows_of(dataset.select(range(min(most, len(dataset))))))
        labels = Labels.of(rows, length_stats(dataset).answers, len(args.attributes or ()))
        dataset = None if args.train_sampling_strategy == "group_by_length" else dataset
    rewards_NAK = torch.zeros(labels.grade_PAK.shape)
    verdict = evaluate_rewards(rewards_NAK, labels, dataset, args.eval_by, args.attributes or ())
    measured = [*sums_on_host(rewards_NAK, labels, [1.0] * len(args.attributes or ())).metrics()]
    measured += [] if verdict is None else [*verdict.metrics()]
    counted = ["pairs"] if args.max_eval_steps is not None else []
    return ["loss", "num_tokens", *measured, *counted, "runtime", "samples_per_second", "steps_per_second"]
