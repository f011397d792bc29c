"""What the rows of a dataset judge: two answers to a prompt, or several that are ranked or graded.

A row is a prompt with answers, of which a batch holds the token ids, and labels that say which is the better one; the
loss and the metrics read them by name (`trl_tpu.modeling.losses`). A pair is the case of two answers, chosen first.

Letters: P pairs or prompts of a batch, K answers of each, A attributes that are graded. Where answers are graded by
several attributes, all that is said of ranked answers has a dimension of these after the first: [P, A, K].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import UserError, UserTypeError
from . import checks
from .measure import NO_LABEL, SOLUTION, id_columns

MOST_ANSWERS = 64
RANKED_COLUMNS = ("answer_ids", "grades")
COUNTED = "comparisons_counted"
"""The column with how many comparisons a row of ranked answers has, where each counts in the loss."""
LABELS_OF_MANY = dict.fromkeys(("grade", "step", "weight", "chosen_probability"), torch.float32)
LABELS_OF_MANY |= {"is_there": torch.bool}
"""Labels that metrics read, and their types."""
OURS = "trl_tpu."
"""Prefix of the keys that our collators add to a padded batch: every other key is the user's or the model's."""

Row = Mapping[str, Any]
Array = TypeVar("Array", np.ndarray, torch.Tensor)


class Pairs:
    """A chosen and a rejected answer, perhaps with the `margin` that is asked for.

    Or with the `chosen_probability` that the chosen one is the better one.
    """

    id_columns: tuple[str, ...] = checks.TOKEN_COLUMNS
    """What preparing the data makes."""
    label_columns = ("margin", "chosen_probability")
    """What may stand beside them."""

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        """Check a raw row, and return its answers by the words for their places in it.

        Args:
            where: How errors begin, see `checks.row_of`.
        """
        answers = {column: row[column] for column in checks.RAW_COLUMNS}
        checks.check_raw_row(row, answers, where)
        return answers

    def prepared(self, row: Row, ids: list[list[int]]) -> Row:
        """Return the columns that preparing a raw row makes of the token ids of its dialogues."""
        return dict(zip(self.id_columns, ids, strict=True))


@dataclass(frozen=True)
class Rankings:
    """Two to 64 answers with `scores` or `ranks`, or one chosen and several rejected ones.

    Their `grades` are higher the better they are. Of two answers with one grade none is the better one.

    Args:
        may_tie: Whether two answers of a row may have equal scores or ranks.
        may_all_tie: Whether all of a row may.
        needs_scores: Whether ranks say too little, and that one answer was chosen.
        counts_comparisons: Whether a row counts as often as it has comparisons, and not once.
        attributes: The names of what is graded, if several are: then scores are a list for each name, or None where
            a row does not say.
        settings: Settings, with their values, that have no effect without rankings.
    """

    may_tie: bool = False
    may_all_tie: bool = False
    needs_scores: bool = False
    counts_comparisons: bool = False
    attributes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    id_columns = RANKED_COLUMNS[:1]

    def check_pairs(self, name: str) -> None:
        """Raise UserError where the dataset ``name`` has pairs, and a setting needs rankings."""
        if self.settings:
            raise UserError(
                f"{', '.join(self.settings)}: only rankings use these settings, and the {name} dataset has pairs. "
                "Leave them out, or give `completions` with `scores` or `ranks`."
            )

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        if set(checks.RAW_COLUMNS) <= set(row) and not self.attributes:
            given: dict[str, Any] = {"chosen": [row.get("chosen")], "rejected": row.get("rejected")}
        else:
            given = {"completions": row.get("completions")}
        for column, values in given.items():
            if not isinstance(values, list) or not values:
                raise UserTypeError(f"{where}: `{column}` must be a list of answers, got {values!r:.80}.")
        answers = {
            f"{column}[{place}]": value for column, values in given.items() for place, value in enumerate(values)
        }
        _check_count(len(answers), where)
        checks.check_raw_row(row, answers, where)
        if (self.needs_scores or self.attributes) and ("scores" not in row or "completions" not in given):
            raise UserError(f"{where} has no `scores`, which loss_type='regression' and attributes need. Add them.")
        if "completions" in given:
            grades = next((name for name in ("scores", "ranks") if name in row), None)
            if grades is None:
                raise UserError(f"{where} has `completions`, but neither `scores` nor `ranks` of them.")
            self.check_grades(row[grades], len(answers), where, grades)
        return answers

    def prepared(self, row: Row, ids: list[list[int]]) -> Row:
        given = [row["scores"][name] for name in self.attributes]
        lists = [scores and grades_of({**row, "scores": scores}) for scores in given]
        return {"answer_ids": ids, "grades": lists or grades_of(row)}

    def comparisons_of(self, grades: list[float]) -> Row:
        """Return how many comparisons prepared grades make, ties among them where they are learned from."""
        pairs = combinations(map(np.float32, grades), 2)
        return {COUNTED: sum(self.may_all_tie or bool(one != other) for one, other in pairs)}

    def check_grades(self, given: Any, answers: int, where: str, column: str) -> None:
        """Check what a row gives as scores, ranks or prepared grades.

        Args:
            given: The value of ``column``.
            answers: How many answers the row has.
            where: How errors begin, see `checks.row_of`.
        """
        _check_count(answers, where)
        lists, counts = self._lists(given, f"{where}: `{column}`"), set[int]()
        for place, values in lists.items():
            if not isinstance(values, list) or len(values) != answers:
                raise UserError(f"{place} is {values!r:.80}, not a list of a number for each of {answers} answers.")
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= checks.LARGEST:
                    raise UserError(f"{place} holds {value!r}; each must be a finite number (float32).")
            counts.add(distinct := len(set(map(np.float32, values))))
            if 1 < distinct < answers and not self.may_tie:
                raise UserError(
                    f"{place} is {values!r:.80}, in which answers are equal, and ties=None says that there are no "
                    "ties. Set ties='skip' not to compare such answers, 'davidson' or 'rao_kupper' to learn from "
                    "ties, or remove such rows."
                )
        if not lists or (not self.may_all_tie and counts == {1}):
            raise UserError(f"{where}: `{column}` is {given!r:.80}, by which no answer is better than another.")

    def _lists(self, given: Any, place: str) -> dict[str, Any]:
        """Return the lists of grades that a column gives, by the words for their places."""
        if not self.attributes:
            return {place: given}
        if isinstance(given, list) and len(given) == len(self.attributes):  # prepared
            given = dict(zip(self.attributes, given, strict=True))
        if not isinstance(given, Mapping) or not set(self.attributes) <= set(given):
            raise UserError(f"{place} is {given!r:.80}; each of attributes={self.attributes} needs a list, or None.")
        return {f"{place} of {name!r}": given[name] for name in self.attributes if given[name] is not None}


def _check_count(answers: int, where: str) -> None:
    if not 2 <= answers <= MOST_ANSWERS:
        raise UserError(f"{where} has {answers} answers; there must be 2 to {MOST_ANSWERS} to be ranked.")


Judgement = Pairs | Rankings
"""One form of rows, from raw ones to those that batches are made of."""


def labels_of(rows: Sequence[Row], answers: int) -> dict[str, np.ndarray]:
    """Return the labels of prepared rows by name, of pairs [P], of ranked answers or steps [P, K].

    Of answers that are graded by several attributes they are [P, A, K].
    """
    if id_columns(rows[0]) == SOLUTION:
        name, given = "step", [[label for label in row["labels"] if label != NO_LABEL] for row in rows]
    elif "grades" in rows[0] and not _is_pair(rows[0]):
        name, given = "grade", [row["grades"] for row in rows]
    else:
        names = [name for name in Pairs.label_columns if name in rows[0]]
        return {name: np.array([row[name] for row in rows], np.float32) for name in names}
    has_attributes = any(isinstance(value, list) for value in given[0])
    lists = [values or [] for row in given for values in row] if has_attributes else given
    value_PK = np.zeros((len(lists), answers), np.float32)
    is_there_PK = np.zeros(value_PK.shape, bool)
    for value_K, is_there_K, values in zip(value_PK, is_there_PK, lists, strict=True):
        value_K[: len(values)] = values
        is_there_K[: len(values)] = True
    shape = (len(rows), -1, answers) if has_attributes else value_PK.shape
    labels = {name: value_PK.reshape(shape), "is_there": is_there_PK.reshape(shape)}
    if name == "step" or COUNTED in rows[0]:
        labels["weight"] = np.array(weights_of(rows), np.float32)
    return labels


def weights_of(rows: Sequence[Row]) -> list[int]:
    """Return how much each prepared row counts in a mean.

    A pair or a prompt counts once, or a prompt once for each comparison; a solution once for each labeled step.
    """
    if id_columns(rows[0]) == SOLUTION:
        return [sum(label != NO_LABEL for label in row["labels"]) for row in rows]
    is_counted = COUNTED in rows[0] and not _is_pair(rows[0])
    return [row[COUNTED] for row in rows] if is_counted else [1] * len(rows)


def _is_pair(row: Row) -> bool:
    """Tell whether a prepared row is a pair, whatever other columns it has."""
    return len(id_columns(row) or ()) == 2


def is_ours(key: str) -> bool:
    """Tell whether the loss reads this key of a padded batch: one of our collators', or TRL's `margin`."""
    return key == "margin" or key.startswith(OURS)


def add_labels(batch: Mapping[str, Any], labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return a padded batch with labels by keys that no user's key can equal; `margin` keeps TRL's name."""
    named = {name if name == "margin" else f"{OURS}{name}": values for name, values in labels.items()}
    return {**batch, **named}


def labels_in(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels that `add_labels` has added, by their names."""
    return {key.removeprefix(OURS): values for key, values in batch.items() if is_ours(key)}


def answers_in(labels: Mapping[str, Any]) -> int:
    """Return how many rows of a padded batch with these labels belong together: K, or 1 of a solution."""
    return 1 if "end" in labels else labels["is_there"].shape[-1] if "is_there" in labels else 2


def grades_of(row: Row) -> list[float]:
    """Return the grades of a raw row's answers, higher the better they are, from scores, ranks or its halves.

    They are rounded to float32, the type of labels in a batch.
    """
    if set(checks.RAW_COLUMNS) <= set(row):
        return [1.0] + [0.0] * len(row["rejected"])
    grades = row["scores"] if "scores" in row else [-rank for rank in row["ranks"]]
    return [float(np.float32(grade)) for grade in grades]


def answers_there(is_there: torch.Tensor) -> torch.Tensor:
    """Return which answers a prompt has, [P, K], of those that are graded, by several attributes or by one."""
    return is_there.reshape(len(is_there), -1, is_there.shape[-1]).any(1)


def weighted(values: Array, weights: Sequence[float]) -> Array:
    """Return the weighted sum over attributes, [P, ...], of values [P, A, ...]; what they are without weights."""
    total: Any = sum(weight * values[:, place] for place, weight in enumerate(weights))
    return total if weights else values


def is_ranking(row: Row) -> bool:
    """Tell whether a converted or prepared row has more answers than a pair, whatever other columns it has."""
    if set(checks.RAW_COLUMNS) <= set(row):
        halves = [row[half] for half in checks.RAW_COLUMNS]
        has_several = [isinstance(half, list) and bool(half) and not isinstance(half[0], dict) for half in halves]
        return has_several == [False, True]
    return not set(checks.TOKEN_COLUMNS) & set(row) and ("completions" in row or set(RANKED_COLUMNS) <= set(row))


def is_above(grade_PK: Array, is_there_PK: Array) -> Array:
    """Return which answers are judged better than which, [P, K, K]: i than j."""
    both_PKK = is_there_PK[..., :, None] & is_there_PK[..., None, :]
    return both_PKK & (grade_PK[..., :, None] > grade_PK[..., None, :])


def with_grades(labels: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the labels of pairs with a `chosen_probability` as those of rankings of two answers."""
    if "chosen_probability" not in labels:
        return labels
    grade_P2 = torch.stack([labels["chosen_probability"], 1 - labels["chosen_probability"]], dim=-1)
    return {**labels, "grade": grade_P2, "is_there": torch.ones_like(grade_P2, dtype=torch.bool)}


def is_equal(grade_PK: torch.Tensor, is_there_PK: torch.Tensor) -> torch.Tensor:
    """Return which answers are judged equal to which later ones, [P, K, K]."""
    both_PKK = is_there_PK[:, :, None] & is_there_PK[:, None, :]
    return (both_PKK & (grade_PK[:, :, None] == grade_PK[:, None, :])).triu(1)


@dataclass(frozen=True)
class Comparisons:
    """Rewards of two answers of which one is better, [P, C], or with attributes or steps [P, ..., C].

    The last dimension holds the comparisons of one ranking, which together count once.
    """

    better: torch.Tensor
    worse: torch.Tensor
    are_there: torch.Tensor

    @classmethod
    def of(cls, rewards_PK: torch.Tensor, mask_P: torch.Tensor, labels: Mapping[str, torch.Tensor]) -> "Comparisons":
        """Return the comparisons of pairs, [P, 1], of ranked answers, [P, K * K], or of each step with 0, [P, K, 1].

        The better answer of a pair is the one that `chosen_probability` favors; at 0.5 there is no comparison.
        """
        if "step" in labels:
            right_PK, there_PK = labels["step"] > 0, labels["is_there"] & mask_P[:, None]
            halves = torch.where(right_PK, rewards_PK, 0.0), torch.where(right_PK, 0.0, rewards_PK), there_PK
            return cls(*(half_PK[..., None] for half_PK in halves))
        labels = with_grades(labels)
        if "grade" not in labels:
            return cls(rewards_PK[:, :1], rewards_PK[:, 1:], mask_P[:, None])
        above_PKK = is_above(labels["grade"], labels["is_there"]) & mask_P.view(-1, *[1] * labels["grade"].dim())
        better_PKK, worse_PKK = torch.broadcast_tensors(rewards_PK[..., :, None], rewards_PK[..., None, :])
        return cls(better_PKK.flatten(-2), worse_PKK.flatten(-2), above_PKK.flatten(-2))

    @property
    def means(self) -> list[torch.Tensor]:
        """The shares of right comparisons and ties of each ranking, and its mean margin, [P, ...]; 0 without any."""
        every = (self.better > self.worse, self.better == self.worse, self.better - self.worse)
        totals = [torch.where(self.are_there, each.to(self.better.dtype), 0.0).sum(-1) for each in every]
        return [total / self.are_there.sum(-1).clamp(min=1) for total in totals]
