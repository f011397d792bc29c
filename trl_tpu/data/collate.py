"""Batches of prepared rows: the comparison table that is built from their labels, and the collator.

Every form of data is trained on comparisons of two rewards, so losses, metrics and evaluation need only this table:

====================  =========================  ========================================  =========================
row                   rewards                    comparisons                               probability
====================  =========================  ========================================  =========================
pair                  chosen, rejected           chosen with rejected                      1 or `chosen_probability`
ranking               one for each answer        any two answers with different grades     1, or 0.5 for a tie
ranking, attributes   answers times attributes   as for a ranking, for each attribute      the same
single answer         one                        the answer with the constant 0            the answer's label
solution with steps   one for each step          the step with the constant 0              the step's label
====================  =========================  ========================================  =========================

Letters: P rows per batch, K answers or steps per row, A attributes, G = P A rankings, M comparisons per ranking,
S = P K scored positions, C = G M comparisons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..packing.batch import Batch, Comparisons
from ..packing.pack import Sequences, last_scored
from .checks import Row
from .kinds import TIE_MODELS, Pairs, RowKind
from .kinds.solutions import STEP_ENDS

PackSequences = Callable[[Sequences], list[Batch[np.ndarray]]]


@dataclass(frozen=True)
class ComparisonRule:
    """Settings of `RewardConfig` that define the comparisons of labeled rows, and their weights.

    Args:
        learns_ties: Whether answers with equal grades are compared, with probability 0.5.
        counts_comparisons: Whether the mean weighs each comparison equally, instead of each row.
        margin_scale: The target margin is this factor times the difference of the grades; None sets no margin.
        attribute_weights: Weight of each attribute's loss; None weighs all attributes equally.
        answers: K, the maximum number of answers or steps per row.
        attributes: A, the number of attributes; 0 if `grades` has no attributes.
        kind: The kind of the rows.
    """

    learns_ties: bool = False
    counts_comparisons: bool = False
    margin_scale: float | None = None
    attribute_weights: Sequence[float] | None = None
    answers: int = 2
    attributes: int = 0
    kind: RowKind = Pairs()

    @classmethod
    def of(cls, args: Any, kind: RowKind, answers: int) -> "ComparisonRule":
        """Return the rule for the settings of a `RewardConfig`, and for rows of this kind with up to K answers."""
        return cls(
            args.ties in TIE_MODELS,
            args.average_over == "comparisons",
            args.margin_scale,
            args.attribute_loss_weights,
            answers,
            len(args.attributes or ()),
            kind.of(args),
        )

    def table(self, rows: Sequence[Row], count: int | None = None) -> "Comparisons[np.ndarray]":
        """Return the comparison table of prepared rows, padded to ``count`` rows."""
        return compare(Labels.of(rows, self.kind, self.answers, self.attributes), self, count)


@dataclass(frozen=True)
class Labels:
    """Labels of rows: one grade for each reward.

    Args:
        grade_PAK: Grade of each answer or step; higher is better, NaN marks an absent answer or grade. The grades of a
            pair are (1, 0), or `chosen_probability` and 1 minus it. The grade of a step is the probability that the
            step is right.
        margin_P: Target margin of each pair; None if the data has no margins.
        kind: The kind of the rows. It says what a grade means, and which rewards are compared.
    """

    grade_PAK: np.ndarray
    margin_P: np.ndarray | None = None
    kind: RowKind = Pairs()

    @classmethod
    def of(cls, rows: Sequence[Row], kind: RowKind, answers: int, attributes: int = 0) -> "Labels":
        """Read the labels of prepared rows.

        Args:
            rows: Prepared rows.
            kind: Their kind.
            answers: K, the maximum number of answers or steps; rows may have fewer.
            attributes: A, the number of attributes; 0 if rows have one list of grades.
        """
        grade_PAK = np.full((len(rows), attributes or 1, answers), np.nan)
        labels_P = list(map(kind.labels, rows))
        for grade_AK, labels in zip(grade_PAK, labels_P, strict=True):
            grades = kind.grades(labels)
            for grade_K, values in zip(grade_AK, grades if attributes else [grades], strict=True):
                if values is not None:
                    grade_K[: len(values)] = values
        has_margins = bool(labels_P) and "margin" in labels_P[0]
        margin_P = np.array([row["margin"] for row in labels_P], np.float32) if has_margins else None
        return cls(grade_PAK, margin_P, kind)

    def grades_of(self, rows: Any) -> "Labels":
        """Return the grades of the selected rows, without the margins that only training uses."""
        return Labels(self.grade_PAK[rows], kind=self.kind)


def pairs_of(count: int) -> Labels:
    """Return the labels of ``count`` pairs, chosen first."""
    return Labels(np.tile([1.0, 0.0], (count, 1, 1)))


def _in_float32(grade_PAK: np.ndarray) -> np.ndarray:
    """Round grades to float32, but keep the order of each ranking: grades that round to one number stay different."""
    order_PAK = np.argsort(grade_PAK, axis=-1)  # NaN comes last
    sorted_PAK = np.take_along_axis(grade_PAK, order_PAK, -1)
    rounded_PAK = sorted_PAK.astype(np.float32)
    for at in range(1, grade_PAK.shape[-1]):
        below_PA, tiny = rounded_PAK[..., at - 1], np.finfo(np.float32).tiny  # devices read smaller numbers as 0
        above_PA = np.maximum(np.nextafter(below_PA, np.float32(np.inf)), below_PA + tiny)
        is_tied_PA = sorted_PAK[..., at] == sorted_PAK[..., at - 1]
        rounded_PAK[..., at] = np.where(is_tied_PA, below_PA, np.maximum(rounded_PAK[..., at], above_PA))
    return np.take_along_axis(rounded_PAK, np.argsort(order_PAK, axis=-1), -1)


def compare(labels: Labels, rule: ComparisonRule, rows: int | None = None) -> Comparisons[np.ndarray]:
    """Build the comparison table of a batch.

    Args:
        labels: Labels of the batch's rows.
        rule: Settings that define the comparisons.
        rows: P, the padded number of rows; by default the number of labeled rows.

    Returns:
        The table; `weight_sum_1` is the total weight of these rows.
    """
    count, attributes, answers = labels.grade_PAK.shape
    grade_PAK = np.pad(labels.grade_PAK, ((0, (rows or count) - count), (0, 0), (0, 0)), constant_values=np.nan)
    grade_GK = grade_PAK.reshape(-1, answers)
    first_M, second_M, probability_GM = labels.kind.compared(grade_GK, rule.learns_ties)
    compared_GM, is_first_GM = ~np.isnan(probability_GM), probability_GM >= 0.5

    ranking_weight_PA = (~np.isnan(grade_PAK)).any(-1) * np.array(rule.attribute_weights or [1.0] * attributes)
    total_P1 = ranking_weight_PA.sum(-1, keepdims=True)
    ranking_weight_G = (ranking_weight_PA / np.where(total_P1 > 0, total_P1, 1)).reshape(-1, 1)
    row_weight_P = (np.arange(len(grade_PAK)) < count).astype(np.float32)
    weight_GM = compared_GM * ranking_weight_G / compared_GM.sum(1, keepdims=True).clip(1)
    if labels.kind.weighs_comparisons or rule.counts_comparisons:
        weight_GM, row_weight_P = compared_GM, compared_GM.reshape(len(grade_PAK), -1).sum(1, dtype=np.float32)

    margin_GM = np.zeros(compared_GM.shape)
    if labels.margin_P is not None:
        margin_GM[:count] = np.where(is_first_GM[:count], 1, -1) * labels.margin_P[:, None]
    elif rule.margin_scale is not None:
        margin_GM = rule.margin_scale * np.abs(grade_GK[:, first_M] - grade_GK[:, second_M])

    def numbers(answer_GM: np.ndarray) -> np.ndarray:
        place_GM = np.arange(len(grade_GK))[:, None]
        number_GM = (place_GM // attributes * answers + answer_GM) * attributes + place_GM % attributes
        return np.where(answer_GM >= 0, number_GM * compared_GM, -1).astype(np.int32).ravel()

    def values(value_GM: np.ndarray) -> np.ndarray:
        return np.where(compared_GM, value_GM, 0).astype(np.float32).ravel()

    total = row_weight_P.sum(keepdims=True)
    return Comparisons(
        better_C=numbers(np.where(is_first_GM, first_M, second_M)),
        worse_C=numbers(np.where(is_first_GM, second_M, first_M)),
        probability_C=values(np.maximum(probability_GM, 1 - probability_GM)),
        margin_C=values(margin_GM),
        weight_C=values(weight_GM),
        grade_SA=_in_float32(grade_PAK).swapaxes(1, 2).reshape(-1, attributes),
        ranking_weight_G=ranking_weight_G.ravel().astype(np.float32),
        row_weight_P=row_weight_P,
        weight_sum_1=np.where(total > 0, total, 1),
        answers=answers,
        kind=labels.kind,
    )


def sequences_of(rows: Sequence[Row], pad_token_id: int, table: Comparisons[np.ndarray] | None = None) -> Sequences:
    """Return the sequences of prepared rows and the positions of their rewards.

    Args:
        pad_token_id: Id of padding tokens. A sequence is scored at its last token with another id.
        table: Comparison table of the rows, perhaps padded to more rows. By default the rows are pairs, as in TRL.
    """
    table = table or ComparisonRule().table(rows)
    ids, at, row_D = list[np.ndarray](), list[np.ndarray](), list[int]()
    for number, row in enumerate(rows):
        answers = [np.asarray(answer, np.int32) for answer in table.kind.answers(row)]
        ids += answers
        row_D += [number] * len(answers)
        if (ends := table.kind.labels(row).get(STEP_ENDS)) is None:
            at += [np.array([last_scored(answer, pad_token_id)]) for answer in answers]
        else:  # a solution without labeled steps has a reward without a grade, so that its row is present
            at.append(np.array(ends or [0], np.int64))
    return Sequences(ids, at, np.array(row_D), pad_token_id, table)


@dataclass(frozen=True)
class Part:
    """One process's part of the rows of a batch.

    Args:
        rows: P, the rows per process; the table of a process with fewer rows is padded.
        index: Index of this process.
        count: Number of processes that share the batch.
        shares_rows: Whether P counts the rows of all processes. Each process then has all data rows in its table, and
            a part of the token rows.
    """

    rows: int
    index: int = 0
    count: int = 1
    shares_rows: bool = False

    def of(self, every: Sequence[Any]) -> list[Any]:
        """Return this process's rows in batch order; the list may be empty.

        Args:
            every: Rows of all processes; may be empty.

        Raises:
            UserError: The batch has more rows than fit into the planned shapes of all processes.
        """
        limit = self.rows if self.shares_rows else self.rows * self.count
        if len(every) > limit:
            raise UserError(f"A batch has at most {limit} rows, as its shapes were planned; got {len(every)}.")
        return list(every if self.shares_rows else every[self.index * self.rows :][: self.rows])

    def table(self, every: Sequence[Row], rule: ComparisonRule) -> Comparisons[np.ndarray]:
        """Return the comparison table of this process's rows, weighted by their share of the weights of all rows.

        Args:
            every: Rows of all processes; may be empty.
            rule: Settings that define the comparisons.
        """
        rows = self.of(every)
        table = rule.table(rows, self.rows)
        total = table if len(rows) == len(every) else rule.table(every)
        return replace(table, weight_sum_1=total.weight_sum_1 / np.float32(self.count))


@dataclass(frozen=True)
class BatchCollator:
    """Collator for this package's own batches, packed or padded.

    Args:
        pack_sequences: Arranges sequences in token rows: `pack`, `pack_unpadded` or `pad`, with their settings.
        pad_token_id: Id of padding tokens. A sequence is scored at its last token with another id.
        rule: Settings that define the comparisons.
        part: This process's part of the rows; None means all rows.
    """

    pack_sequences: PackSequences
    pad_token_id: int
    rule: ComparisonRule = ComparisonRule()
    part: Part | None = None

    def __call__(self, rows: Sequence[Row], real: int | None = None) -> Batch[torch.Tensor]:
        """Make the batch from the first ``real`` rows; the remaining rows are padding."""
        part, every = self.part or Part(len(rows)), rows[:real]
        own_rows, table = part.of(every), part.table(every, self.rule)
        batches = self.pack_sequences(sequences_of(own_rows or rows[:1], self.pad_token_id, table))
        if not own_rows:  # a process without rows still runs the step, on a row without weight
            batches = [replace(batch, tokens_S=0 * batch.tokens_S) for batch in batches]
        return replace(batches[-1], earlier=tuple(batches[:-1])).map_tensors(torch.from_numpy)
