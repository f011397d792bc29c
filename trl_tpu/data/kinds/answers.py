"""Single answers: rows with one answer and its label or score."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...errors import UserError
from ..checks import Row
from ..formats import convert_row
from .base import LABELS_AS, ScoredItem
from .rankings import Rankings

_SCORES = "scores"  # the value of `labels_as`


@dataclass(frozen=True)
class Answers(Rankings):
    """Rows with one answer: with the probability that it is right, or with a score that its reward predicts.

    Args:
        predicts_scores: Whether the reward predicts the score, in the score's unit. Otherwise the label is the
            probability that the answer is right, ``sigmoid(reward)``.
    """

    may_all_tie: bool = True
    predicts_scores: bool = False
    name = unit = "answers"
    does, swapped, lacks = "tells right from wrong", "the labels", "no finite reward, or no label"
    centered, too_long = "the squared reward", "answers"
    orders_answers, sequences = False, 1
    compares_with_zero = True
    counts, counted = range(1, 2), "1 as in the first row"

    def of(self, args: Any, **_: Any) -> Self:
        is_regression = args.loss_type == "regression"
        return replace(
            self, attributes=tuple(args.attributes or ()), needs_scores=is_regression, predicts_scores=is_regression
        )

    def is_raw(self, row: Row) -> bool:
        is_unlabeled = "completions" not in row and "completion" in row and bool({"label", "score"} & row.keys())
        return is_unlabeled or super().is_raw(row)

    @property
    def labels_as(self) -> str | None:
        return _SCORES if self.predicts_scores else None

    def scored(self, columns: Collection[str], rows: Sequence[Row]) -> Self | None:
        found = super().scored(columns, rows)
        return found and replace(found, predicts_scores=any(row.get(LABELS_AS) == _SCORES for row in rows))

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        if "completions" not in row and "completion" in row:
            label = row.get("label", row.get("score"))
            raise UserError(f"{where}: `label` or `score` must be a number (got {label!r:.60}). Correct or remove it.")
        return super().raw_answers(self._read(row), where)

    def tokenized(self, row: Row, ids_K: list[list[int]], where: str) -> dict[str, Any]:
        return super().tokenized(self._read(row), ids_K, where)

    def _read(self, row: Row) -> Row:
        """Return a row without its label if rewards predict scores and it has a score."""
        has_both = None not in (row.get("label"), row.get("score")) and row["completions"] == [row.get("completion")]
        return {**row, "scores": [row["score"]]} if has_both and self.predicts_scores else row

    def check_grade(self, value: float, place: str) -> None:
        if not self.predicts_scores and not 0 <= value <= 1:
            raise UserError(
                f"{place} holds {value!r}; for a single answer it must be the probability that the answer is right, "
                "from 0 to 1. For grades in another range set loss_type='regression'."
            )

    def compared(self, grade_GK: np.ndarray, learns_ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compare each answer with the constant 0. A score does not say which of the two is better."""
        probability_GK = np.where((grade_GK >= 0) & (grade_GK <= 1), grade_GK, np.nan)
        if self.predicts_scores:
            probability_GK = np.where(np.isnan(grade_GK), np.nan, 0.5)
        return np.array([0]), np.array([-1]), probability_GK

    def from_scored(self, row: Row) -> Iterator[ScoredItem]:
        yield from super().from_scored(self._read(convert_row(row)[0]))
