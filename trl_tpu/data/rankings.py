"""Rankings: rows with several answers and their scores or ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, IterableDataset

from ..errors import UserError, UserTypeError
from . import checks
from .checks import RAW_COLUMNS, PairKind, Row
from .length_stats import PAIR_LABELS, RANKING, answers_of

MOST_ANSWERS = 64


@dataclass(frozen=True)
class RankingKind(PairKind):
    """Reader and checker of rows with 2 to 64 answers: with `scores` or `ranks`, or one chosen and several rejected.

    The better an answer, the higher its grade in `grades`. Two answers with equal grades are tied.

    Args:
        may_tie: Whether two answers of a row may have equal scores or ranks.
        may_all_tie: Whether all answers of a row may have equal scores or ranks.
        needs_scores: Whether rows must have `scores`; `ranks`, or a chosen answer, are then not enough.
        attributes: Names of the graded attributes, if any. `scores` then has a list for each name, or None where the
            row has no grades for this attribute.
        settings: Settings with their values, such as ``ties='skip'``, that have no effect without rankings.
        has_single_answers: Whether each row has one answer. Its score is the probability that the answer is right,
            or any number with `needs_scores`.
    """

    may_tie: bool = False
    may_all_tie: bool = False
    needs_scores: bool = False
    attributes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    has_single_answers: bool = False
    columns = RANKING

    def check_dataset(self, dataset: Dataset | IterableDataset, columns: list[str], name: str) -> None:
        """Reject a stream of rankings, and columns that have no effect on them."""
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f"The {name} dataset is a stream of rankings, so the number of answers per row is unknown. Convert it "
                "to a dataset: `datasets.Dataset.from_list(list(stream.take(n)))`."
            )
        if self.has_single_answers and (
            unused := [name for name in self.settings if name != "loss_type='regression'"]
        ):
            raise UserError(
                f"{', '.join(unused)}: only rankings use these settings, and the {name} dataset has one answer per "
                "row. Leave them out."
            )
        if unused := [column for column in PAIR_LABELS if column in columns]:
            raise UserError(
                f"The {name} dataset has rankings, whose loss does not use the column `{unused[0]}`. Drop the column: "
                f"`dataset.remove_columns({unused})`."
            )

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        """Check a raw row, and return its answers by their place in the row."""
        has_halves, answers = set(RAW_COLUMNS) <= set(row) and not self.attributes, dict[str, Any]()
        for column in RAW_COLUMNS if has_halves else ("completions",):
            values = [row["chosen"]] if column == "chosen" else row.get(column)
            if not isinstance(values, list) or not values:
                raise UserTypeError(f"{where}: `{column}` must be a list of answers, got {values!r:.80}.")
            answers |= {f"{column}[{place}]": value for place, value in enumerate(values)}
        checks.check_raw_row(row, answers, where)
        if (self.needs_scores or self.attributes) and ("scores" not in row or has_halves):
            raise UserError(f"{where} has no `scores`, which loss_type='regression' and attributes need. Add them.")
        column = "rejected" if has_halves else next((name for name in ("scores", "ranks") if name in row), "")
        if not column:
            raise UserError(f"{where} has `completions`, but neither `scores` nor `ranks`.")
        rule = replace(self, may_tie=True) if has_halves else self  # rejected answers are not compared
        rule.check_grades(grades_of(row) if has_halves else row[column], len(answers), where, column)
        return answers

    def tokenized(self, row: Row, ids_K: list[list[int]], where: str) -> dict[str, Any]:
        """Return the tokenized columns of a checked raw row; `grades` has a list, or a list or None per attribute."""
        scores_A = [row["scores"][name] for name in self.attributes]
        grades = [scores and grades_of({**row, "scores": scores}) for scores in scores_A] or grades_of(row)
        return {"answer_ids": ids_K, "grades": grades}

    def check_labels(self, row: Row, where: str) -> None:
        """Check the grades of a tokenized row."""
        self.check_grades(row["grades"], len(answers_of(row)), where, "grades")

    def check_grades(self, grades: Any, answers: int, where: str, column: str) -> None:
        """Check the scores, ranks or prepared grades of a row.

        Args:
            grades: The value of ``column``.
            answers: Number of answers in the row.
            where: Beginning of error messages, see `checks.row_of`.
            column: Name of the column for error messages.
        """
        if self.has_single_answers != (answers == 1) or not 1 <= answers <= MOST_ANSWERS:
            number = "1 as in the first row" if self.has_single_answers else f"2 to {MOST_ANSWERS} to be ranked"
            raise UserError(f"{where} has {answers} answers; each row must have {number}.")
        lists, counts = self._grade_lists(grades, f"{where}: `{column}`"), set[int]()
        for place, values in lists.items():
            if not isinstance(values, list) or len(values) != answers:
                raise UserError(f"{place} is {values!r:.80}, not a list with a number for each of {answers} answers.")
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= checks.LARGEST:
                    raise UserError(f"{place} holds {value!r}; each must be a finite number (float32).")
                if self.has_single_answers and not self.needs_scores and not 0 <= value <= 1:
                    raise UserError(
                        f"{place} holds {value!r}; for a single answer it must be the probability that the answer is "
                        "right, from 0 to 1. For grades in another range set loss_type='regression'."
                    )
            counts.add(distinct := len(set(map(float, values))))
            if 1 < distinct < answers and not self.may_tie:
                raise UserError(
                    f"{place} is {values!r:.80}: some answers are equal, but ties=None does not allow ties. Set "
                    "ties='skip' to leave out comparisons of equal answers, set 'davidson' or 'rao_kupper' to learn "
                    "from ties, or remove such rows."
                )
        if not lists or (not self.may_all_tie and not self.has_single_answers and counts == {1}):
            raise UserError(
                f"{where}: `{column}` is {grades!r:.80}, so no answer is better than another. Remove such rows."
            )

    def _grade_lists(self, grades: Any, place: str) -> dict[str, Any]:
        """Return the lists of grades in a column by their place in the row: one list, or one per attribute."""
        if not self.attributes:
            return {place: grades}
        if isinstance(grades, list) and len(grades) == len(self.attributes):  # a prepared row
            grades = dict(zip(self.attributes, grades, strict=True))
        if not isinstance(grades, Mapping) or not set(self.attributes) <= set(grades):
            raise UserError(f"{place} is {grades!r:.80}; each of attributes={self.attributes} needs a list, or None.")
        return {f"{place} of {name!r}": grades[name] for name in self.attributes if grades[name] is not None}


def grades_of(row: Row) -> list[float]:
    """Return the grades of a raw row's answers (higher is better), from scores, ranks, or `chosen` and `rejected`."""
    if set(RAW_COLUMNS) <= set(row):
        return [1.0] + [0.0] * len(row["rejected"])
    return [*map(float, row["scores"])] if "scores" in row else [-float(rank) for rank in row["ranks"]]


def is_ranking(row: Row) -> bool:
    """Check whether a converted row has more answers than a pair, whatever its other columns are."""
    if not set(RAW_COLUMNS) <= set(row):
        return "completions" in row
    lists = [isinstance(row[half], list) and row[half] and not isinstance(row[half][0], dict) for half in RAW_COLUMNS]
    return bool(lists[1] and not lists[0])
