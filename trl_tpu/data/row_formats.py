"""Forms of rows, and how each becomes token ids and labels."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, UserTypeError
from . import checks
from .batch import OLD_KEYS
from .formats import maybe_apply_chat_template

OLD_IDS = OLD_KEYS[::2]


def token_columns(columns: Collection[str], name: str) -> tuple[str, ...]:
    """Return the columns that hold the token ids of pairs; none if pairs are raw.

    Raises:
        UserError: Some of the four columns of TRL up to 0.23 are missing.
    """
    if set(checks.TOKEN_COLUMNS) <= set(columns):
        return checks.TOKEN_COLUMNS
    missing = [column for column in OLD_KEYS if column not in columns]
    if len(missing) == len(OLD_KEYS):
        return ()
    if missing:
        raise UserError(
            f"The {name} dataset lacks {', '.join(missing)}; its columns are {sorted(columns)}. Rows in the form of "
            f"TRL up to 0.23 have {', '.join(OLD_KEYS)}; today's have {' and '.join(checks.TOKEN_COLUMNS)}."
        )
    return OLD_IDS


def read_old_columns(dataset: Dataset | IterableDataset, num_embeddings: int, name: str) -> Dataset | IterableDataset:
    """Check pairs in the columns of TRL up to 0.23, and make them `chosen_ids` and `rejected_ids`.

    What an attention mask leaves out is no part of an answer, and a margin may be a list of one.

    Raises:
        UserTypeError: A value is no list of integers.
        UserError: Token ids that the model lacks, or a mask with a hole.
    """
    settings = {"num_embeddings": num_embeddings, "name": name}
    return dataset.map(_read_old, with_indices=True, fn_kwargs=settings, remove_columns=list(OLD_KEYS))


def _read_old(row: Mapping[str, Any], index: int, num_embeddings: int, name: str) -> dict[str, Any]:
    answers = dict[str, Any]()
    for new, old in zip(checks.TOKEN_COLUMNS, OLD_IDS, strict=True):
        where, mask = checks.row_of(index, name, old), row[old.replace("input_ids", "attention_mask")]
        checks.check_ids(row[old], where, num_embeddings)
        kept = np.flatnonzero(mask)
        if not len(kept) or len(mask) != len(row[old]) or len(kept) != np.ptp(kept) + 1:
            raise UserError(
                f"{where}: the attention mask must be as long as the token ids, and 0 only before or after all tokens "
                f"that count, got {mask!r:.80}."
            )
        answers[new] = list(row[old][kept[0] : kept[-1] + 1])
    return answers | old_margin(row, index, name)


def old_margin(row: Mapping[str, Any], index: int, name: str) -> dict[str, float]:
    """Return the margin, if any, of a row for TRL up to 0.23, which may be a list of one number.

    Raises:
        UserError: It is not finite, or a list of several.
    """
    if "margin" not in row:
        return {}
    margin = np.asarray(row["margin"])
    margin = margin[0] if margin.shape == (1,) else margin
    checks.check_margin(margin, checks.row_of(index, name, "margin"))
    return {"margin": float(margin)}


def render_old(row: dict[str, Any], where: str, processing_class: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a raw row's two texts as TRL up to 0.23 tokenized them: without the prompt."""
    with checks.rendering(where):
        rendered = maybe_apply_chat_template(row, processing_class)
    return {column: rendered[column] for column in checks.RAW_COLUMNS}


def _tokenize(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into the columns of TRL up to 0.23, where it is public."""
    columns = {}
    for half in checks.RAW_COLUMNS:
        tokens = tokenizer(list(batch[half]))
        columns[f"input_ids_{half}"] = tokens["input_ids"]
        columns[f"attention_mask_{half}"] = tokens["attention_mask"]
    return columns


MOST_ANSWERS = 64
Row = Mapping[str, Any]


class Pairs:
    """A chosen and a rejected answer, perhaps with the `margin` that is asked for.

    Or with the `chosen_probability` that the chosen one is the better one.
    """

    label_columns = ("margin", "chosen_probability")
    """Optional labels."""

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        """Check a raw row, and return its answers by the words for their places in it.

        Args:
            where: How errors begin, see `checks.row_of`.
        """
        answers = {column: row[column] for column in checks.RAW_COLUMNS}
        checks.check_raw_row(row, answers, where)
        return answers

    def prepared(self, row: Row, ids: list[list[int]]) -> Row:
        """Return the columns that a raw row gets, given the token ids of its answers."""
        return dict(zip(checks.TOKEN_COLUMNS, ids, strict=True))


@dataclass(frozen=True)
class Rankings:
    """Two to 64 answers with `scores` or `ranks`, or one chosen and several rejected ones.

    Their `grades` are higher the better they are. Of two answers with one grade none is the better one.

    Args:
        may_tie: Whether two answers of a row may have equal scores or ranks.
        may_all_tie: Whether all of a row may.
        needs_scores: Whether ranks say too little, and that one answer was chosen.
        attributes: The names of what is graded, if several are: then scores are a list for each name, or None where
            a row does not say.
        settings: Settings, with their values, that have no effect without rankings.
    """

    may_tie: bool = False
    may_all_tie: bool = False
    needs_scores: bool = False
    attributes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

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


def grades_of(row: Row) -> list[float]:
    """Return the grades of a raw row's answers, higher the better they are, from scores, ranks or its halves.

    They are rounded to float32, the type of labels in a batch.
    """
    if set(checks.RAW_COLUMNS) <= set(row):
        return [1.0] + [0.0] * len(row["rejected"])
    grades = row["scores"] if "scores" in row else [-rank for rank in row["ranks"]]
    return [float(np.float32(grade)) for grade in grades]


def is_ranking(row: Row) -> bool:
    """Tell whether a converted row has more answers than a pair, whatever other columns it has."""
    if set(checks.RAW_COLUMNS) <= set(row):
        halves = [row[half] for half in checks.RAW_COLUMNS]
        has_several = [isinstance(half, list) and bool(half) and not isinstance(half[0], dict) for half in halves]
        return has_several == [False, True]
    return "completions" in row
