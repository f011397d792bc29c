"""Rankings: rows with several answers and their scores or ranks; and single answers with a label or a score."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, ClassVar, Self

import numpy as np

from ...errors import UserError, UserTypeError
from .. import checks
from ..checks import RAW_COLUMNS, Row
from ..formats import convert_row
from .base import LABELS_AS, RowKind, ScoredItem, numbers_in
from .pairs import Pairs, rejects_several

MOST_ANSWERS = 64
TIE_MODELS = ("rao_kupper", "davidson")
_SCORES = "scores"  # the value of `labels_as`


@dataclass(frozen=True)
class Rankings(RowKind):
    """Rows with 2 to 64 answers: with `scores` or `ranks`, or one chosen and several rejected.

    The better an answer, the higher its grade in `grades`. Two answers with equal grades are tied.

    Args:
        may_tie: Whether two answers of a row may have equal scores or ranks.
        may_all_tie: Whether all answers of a row may have equal scores or ranks.
        needs_scores: Whether rows must have `scores`; `ranks`, or a chosen answer, are then not enough.
        attributes: Names of the graded attributes, if any. `scores` then has a list for each name, or None where the
            row has no grades for this attribute.
    """

    may_tie: bool = False
    may_all_tie: bool = False
    needs_scores: bool = False
    attributes: tuple[str, ...] = ()
    name = "rankings"
    unit = "pairs"
    too_long = "rankings with an answer"
    columns = ("answer_ids", "grades")
    token_columns = ("answer_ids",)
    scored_columns = {"completions": ("rewards", "tokens")}
    orders_answers = True
    counts: ClassVar[range] = range(2, MOST_ANSWERS + 1)  # possible numbers of answers
    counted: ClassVar[str] = f"2 to {MOST_ANSWERS} to be ranked"

    def of(self, args: Any, **_: Any) -> Self:
        is_regression = args.loss_type == "regression"
        return replace(
            self,
            may_tie=is_regression or args.ties is not None,
            may_all_tie=is_regression or args.ties in TIE_MODELS,
            needs_scores=is_regression,
            attributes=tuple(args.attributes or ()),
        )

    # ---- raw rows

    def is_raw(self, row: Row) -> bool:
        """Check that the number of answers is not that of a pair. Other columns have no effect."""
        if set(RAW_COLUMNS) <= row.keys():
            return rejects_several(row) and 1 not in self.counts
        return "completions" in row and self._has_count(row["completions"])

    def is_tokenized(self, row: Row) -> bool:
        # a column `answer_ids` of texts or numbers belongs to the user
        if not super().is_tokenized(row) or (ids_K := row["answer_ids"]) is None:
            return False
        return not isinstance(next(iter(ids_K), None), str | int) and self._has_count(ids_K)

    def _has_count(self, answers: Any) -> bool:
        """Check that there is one answer for a kind of single answers, and not one for others."""
        return (not isinstance(answers, str | None) and len(answers) == 1) == (1 in self.counts)

    def check_dataset(self, columns: Collection[str], name: str) -> Self:
        if unused := [column for column in Pairs.optional_columns if column in columns]:
            raise UserError(
                f"The {name} dataset has {self.name}, whose loss does not use the column `{unused[0]}`. Drop the "
                f"column: `dataset.remove_columns({unused})`."
            )
        # several rejected answers to one chosen answer are tied; they are not compared
        return replace(self, may_tie=self.may_tie or set(RAW_COLUMNS) <= set(columns))

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        needs_scores, answers = self.needs_scores or bool(self.attributes), dict[str, Any]()
        has_halves = set(RAW_COLUMNS) <= set(row) and not needs_scores
        for column in RAW_COLUMNS if has_halves else ("completions",):
            values = [row["chosen"]] if column == "chosen" else row.get(column)
            if not isinstance(values, list) or not values:
                raise UserTypeError(f"{where}: `{column}` must be a list of answers, got {values!r:.80}.")
            answers |= {f"{column}[{place}]": value for place, value in enumerate(values)}
        checks.check_raw_row(row, answers, where)
        graded = ("rejected",) if has_halves else ("scores",) if needs_scores else ("scores", "ranks")
        column = next((name for name in graded if name in row), "")
        if not column:
            raise UserError(f"{where} lacks {' or '.join(f'`{name}`' for name in graded)} of its `completions`.")
        self.check_grades(grades_of(row) if has_halves else row[column], len(answers), where, column)
        return answers

    def tokenized(self, row: Row, ids_K: list[list[int]]) -> dict[str, Any]:
        """Return the prepared columns; `grades` has a list, or a list or None per attribute."""
        scores_A = [row["scores"][name] for name in self.attributes]
        grades = [scores and grades_of({**row, "scores": scores}) for scores in scores_A] or grades_of(row)
        return {"answer_ids": ids_K, "grades": grades}

    # ---- prepared rows

    def answers(self, row: Row) -> list[Any]:
        return row["answer_ids"]

    def with_answers(self, ids_K: list[list[int]]) -> dict[str, Any]:
        return {"answer_ids": ids_K}

    def check_labels(self, row: Row, where: str) -> None:
        """Check the grades of a prepared row."""
        self.check_grades(row["grades"], len(row["answer_ids"]), where, "grades")

    def check_grades(self, grades: Any, answers: int, where: str, column: str) -> None:
        """Check the scores, ranks or prepared grades of a row.

        Args:
            grades: The value of ``column``.
            answers: Number of answers in the row.
            where: Beginning of error messages, see `checks.row_of`.
            column: Name of the column for error messages.
        """
        if answers not in self.counts:
            raise UserError(f"{where} has {answers} answers; each row must have {self.counted}.")
        lists, counts = self._grade_lists(grades, f"{where}: `{column}`"), set[int]()
        for place, values in lists.items():
            is_list = isinstance(values, list) and len(values) == answers
            if not is_list or not all(map(self.is_grade, values)):
                raise UserError(
                    f"{place} is {values!r:.80}, not a list of {answers} finite numbers (float32). The label of a "
                    "single answer is the probability that it is right, 0 to 1, unless loss_type='regression'."
                )
            counts.add(distinct := len(set(map(float, values))))
            if 1 < distinct < answers and not self.may_tie:
                raise UserError(
                    f"{place} is {values!r:.80}: some answers are equal, but ties=None does not allow ties. Set "
                    "ties='skip' to leave out comparisons of equal answers, set 'davidson' or 'rao_kupper' to learn "
                    "from ties, or remove such rows."
                )
        if not lists or (answers > 1 and not self.may_all_tie and counts == {1}):
            raise UserError(
                f"{where}: `{column}` is {grades!r:.80}, so no answer is better than another. Remove such rows."
            )

    def is_grade(self, value: Any) -> bool:
        """Check whether a score, rank or label is possible."""
        return checks.is_number(value)

    def _grade_lists(self, grades: Any, place: str) -> dict[str, Any]:
        """Return the lists of grades in a column by their place in the row: one list, or one per attribute."""
        if not self.attributes:
            return {place: grades}
        if isinstance(grades, list) and len(grades) == len(self.attributes):  # a prepared row
            grades = dict(zip(self.attributes, grades, strict=True))
        if not isinstance(grades, Mapping) or not set(self.attributes) <= set(grades):
            raise UserError(f"{place} is {grades!r:.80}; each of attributes={self.attributes} needs a list, or None.")
        return {f"{place} of {name!r}": grades[name] for name in self.attributes if grades[name] is not None}

    # ---- comparisons

    def compared(self, grade_GK: np.ndarray, learns_ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compare any two answers with different grades, and with ``learns_ties`` also answers with equal grades."""
        first_M, second_M = np.triu_indices(grade_GK.shape[1], 1)
        difference_GM = grade_GK[:, first_M] - grade_GK[:, second_M]
        probability_GM = (np.sign(difference_GM) + 1) / 2  # NaN for missing answers
        return first_M, second_M, np.where((difference_GM == 0) & (not learns_ties), np.nan, probability_GM)

    # ---- scored rows

    def scored(self, columns: Collection[str], rows: Sequence[Row]) -> Self | None:
        if "step_rewards" in columns or super().scored(columns, rows) is None:  # of a process reward model
            return None
        has_several = any(len(rewards_K) > 1 for row in rows for _, rewards_K, _ in self.from_scored(row))
        return None if has_several == (1 in self.counts) else self

    def from_scored(self, row: Row) -> Iterator[ScoredItem]:
        scores, by_attribute = row.get("scores"), row.get("rewards_by_attribute") or [None]
        graded = scores if isinstance(scores, dict) and None not in by_attribute else {}
        if names := [name for name in graded if name in by_attribute[0]]:
            for name in names:
                values = [rewards[name] for rewards in by_attribute]
                part = {"attribute": name, "scores": graded[name], "rewards": values, "rewards_by_attribute": None}
                yield from self.from_scored({**row, **part})
            return
        rewards, grades = row.get("rewards"), row.get("scores" if "scores" in row else "ranks")
        if "completions" in row and isinstance(rewards, list) and isinstance(grades, list):
            is_number = [isinstance(grade, int | float) and isfinite(grade) for grade in grades]
            if is_number == [True] * len(rewards):
                yield row, numbers_in(rewards), grades_of(row)
                return
        yield row, [], []


@dataclass(frozen=True)
class Answers(Rankings):
    """Rows with one answer: with the probability that it is right, or with a score that its reward predicts.

    Args:
        predicts_scores: Whether the reward predicts the score, in the score's unit. Otherwise the label is the
            probability that the answer is right, ``sigmoid(reward)``.
    """

    predicts_scores: bool = False
    name = unit = "answers"
    does, swapped, lacks = "tells right from wrong", "the labels", "no finite reward, or no label"
    centered, too_long = "the squared reward", "answers"
    orders_answers = False
    compares_with_zero = True
    counts, counted = range(1, 2), "1 as in the first row"

    def of(self, args: Any, **_: Any) -> Self:
        return replace(super().of(args), predicts_scores=args.loss_type == "regression")

    def is_raw(self, row: Row) -> bool:
        is_unlabeled = "completions" not in row and "completion" in row and bool({"label", "score"} & row.keys())
        return is_unlabeled or super().is_raw(row)

    def labels_as(self, args: Any) -> str | None:
        return _SCORES if args.loss_type == "regression" else None

    def scored(self, columns: Collection[str], rows: Sequence[Row]) -> Self | None:
        found = super().scored(columns, rows)
        return found and replace(found, predicts_scores=any(row.get(LABELS_AS) == _SCORES for row in rows))

    def converted(self, row: Row) -> tuple[Row, list[str]]:
        """Convert a raw row. If rewards predict scores, its score replaces its label."""
        new, notes = convert_row(row)
        has_both = None not in (new.get("label"), new.get("score"))
        is_single = has_both and new.get("completions") == [new.get("completion")]
        return new | {"scores": [new["score"]]} if is_single and self.predicts_scores else new, notes

    def is_grade(self, value: Any) -> bool:
        return super().is_grade(value) and (self.predicts_scores or 0 <= value <= 1)

    def compared(self, grade_GK: np.ndarray, learns_ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compare each answer with the constant 0. A score does not say which of the two is better."""
        probability_GK = np.where((grade_GK >= 0) & (grade_GK <= 1), grade_GK, np.nan)
        if self.predicts_scores:
            probability_GK = np.where(np.isnan(grade_GK), np.nan, 0.5)
        return np.array([0]), np.array([-1]), probability_GK

    def from_scored(self, row: Row) -> Iterator[ScoredItem]:
        yield from super().from_scored(self.converted(row)[0])


def grades_of(row: Row) -> list[float]:
    """Return the grades of a raw row's answers (higher is better), from scores, ranks, or `chosen` and `rejected`."""
    if set(RAW_COLUMNS) <= set(row):
        return [1.0] + [0.0] * len(row["rejected"])
    return [*map(float, row["scores"])] if "scores" in row else [-float(rank) for rank in row["ranks"]]
