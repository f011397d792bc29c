"""Forms of rows: their answers and labels, and the columns that tokenizing makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, UserTypeError
from . import checks
from .batch import OLD_KEYS
from .checks import RAW_COLUMNS
from .formats import maybe_apply_chat_template
from .measure import ANSWERS, NO_LABEL, PAIR, RANKING

OLD_IDS = OLD_KEYS[::2]
MOST_ANSWERS = 64
Row = Mapping[str, Any]

# ---- pairs and rankings


class Pairs:
    """A chosen and a rejected answer, perhaps with a `margin` or a `chosen_probability`."""

    columns = PAIR
    """The columns that tokenizing makes."""

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        """Check a raw row, and return its answers by their places in it.

        Args:
            where: How errors begin, see `checks.row_of`.
        """
        answers = {column: row[column] for column in RAW_COLUMNS}
        checks.check_raw_row(row, answers, where)
        return answers

    def tokenized(self, row: Row, ids_K: list[list[int]]) -> dict[str, Any]:
        """Return the columns of a checked raw row whose answers have these token ids."""
        return dict(zip(PAIR, ids_K, strict=True))

    def check_labels(self, row: Row, where: str) -> None:
        """Check the labels of a row of `measure.read_row`.

        Raises:
            UserError: The margin is not a finite number, or the probability not one from 0 to 1.
        """
        if "margin" in row:
            checks.check_margin(row["margin"], f"{where}: `margin`")
        value = row.get("chosen_probability", 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise UserError(
                f"{where}: `chosen_probability` is {value!r}; it must be how likely the chosen answer is the better "
                "one, 0 to 1. Correct or remove such rows, or drop the column."
            )


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
    columns = RANKING

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        """Check a raw row, and return its answers by their places in it."""
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
            raise UserError(f"{where} has `completions`, but neither `scores` nor `ranks` of them.")
        rule = replace(self, may_tie=True) if has_halves else self  # rejected answers are not compared
        rule.check_grades(grades_of(row) if has_halves else row[column], len(answers), where, column)
        return answers

    def tokenized(self, row: Row, ids_K: list[list[int]]) -> dict[str, Any]:
        """Return the columns of a checked raw row; its grades are a list, or one or None for each attribute."""
        given = [row["scores"][name] for name in self.attributes]
        grades = [scores and grades_of({**row, "scores": scores}) for scores in given] or grades_of(row)
        return {"answer_ids": ids_K, "grades": grades}

    def check_labels(self, row: Row, where: str) -> None:
        """Check the grades of a row of `measure.read_row`."""
        self.check_grades(row["grades"], len(row[ANSWERS]), where, "grades")

    def check_grades(self, given: Any, answers: int, where: str, column: str) -> None:
        """Check the scores, ranks or prepared grades of a row.

        Args:
            given: The value of ``column``.
            answers: How many answers the row has.
            where: How errors begin, see `checks.row_of`.
        """
        if not 2 <= answers <= MOST_ANSWERS:
            raise UserError(f"{where} has {answers} answers; there must be 2 to {MOST_ANSWERS} to be ranked.")
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
        """Return the lists of grades in a column by their places: one, or one for each attribute."""
        if not self.attributes:
            return {place: given}
        if isinstance(given, list) and len(given) == len(self.attributes):  # prepared
            given = dict(zip(self.attributes, given, strict=True))
        if not isinstance(given, Mapping) or not set(self.attributes) <= set(given):
            raise UserError(f"{place} is {given!r:.80}; each of attributes={self.attributes} needs a list, or None.")
        return {f"{place} of {name!r}": given[name] for name in self.attributes if given[name] is not None}


def grades_of(row: Row) -> list[float]:
    """Return the grades of a raw row's answers, higher the better they are, from scores, ranks or its halves.

    They are rounded to float32, the type of labels in a batch.
    """
    if set(RAW_COLUMNS) <= set(row):
        return [1.0] + [0.0] * len(row["rejected"])
    grades = row["scores"] if "scores" in row else [-rank for rank in row["ranks"]]
    return [float(np.float32(grade)) for grade in grades]


def is_ranking(row: Row) -> bool:
    """Tell whether a converted row has more answers than a pair, whatever other columns it has."""
    if not set(RAW_COLUMNS) <= set(row):
        return "completions" in row
    lists = [isinstance(row[half], list) and row[half] and not isinstance(row[half][0], dict) for half in RAW_COLUMNS]
    return bool(lists[1] and not lists[0])


# ---- pairs of TRL up to 0.23


def read_old_row(row: Row, index: int, num_embeddings: int, name: str) -> dict[str, Any]:
    """Return the columns of today for a pair in the columns of TRL up to 0.23.

    Tokens that an attention mask leaves out are no part of an answer, and a margin may be a list of one.

    Raises:
        UserTypeError: A value is not a list of integers.
        UserError: The model lacks a token id, or a mask has a hole or another length.
    """
    answers = dict[str, Any]()
    for new, old in zip(PAIR, OLD_IDS, strict=True):
        ids, mask, where = row[old], row[old.replace("input_ids", "attention_mask")], checks.row_of(index, name, old)
        checks.check_ids(ids, where, num_embeddings)
        kept = np.flatnonzero(mask)
        if not len(kept) or len(mask) != len(ids) or len(kept) != np.ptp(kept) + 1:
            raise UserError(
                f"{where}: the attention mask must be as long as the token ids, and 0 only before or after all tokens "
                f"that count, got {mask!r:.80}."
            )
        answers[new] = list(ids[kept[0] : kept[-1] + 1])
    return answers | old_margin(row, index, name)


def old_margin(row: Row, index: int, name: str) -> dict[str, float]:
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
    return {column: rendered[column] for column in RAW_COLUMNS}


def _tokenize(batch: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into the columns of TRL up to 0.23, where it is public."""
    tokens = [tokenizer(list(batch[half])) for half in RAW_COLUMNS]
    return dict(zip(OLD_KEYS, [each[key] for each in tokens for key in ("input_ids", "attention_mask")], strict=True))


# ---- solutions whose steps are judged


def are_labels(labels: Any, steps: int) -> bool:
    """Tell whether these are the labels of as many steps, 0 or 1 of each."""
    return isinstance(labels, list) and [label in (0, 1) for label in labels] == [True] * steps


def check_solution(row: Row, where: str) -> None:
    """Raise UserError unless a raw row's prompt and steps are texts."""
    prompt, steps = row.get("prompt"), row.get("completions")
    if not isinstance(steps, list) or not all(isinstance(text, str) for text in (prompt, *steps)):
        raise UserError(f"{where}: `prompt` must be text, and `completions` a list of texts, the steps.")
    for text in (prompt, *steps):
        checks.check_text(text, where)


def tokenize_solution(
    features: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    step_separator: str,
    max_length: int | None,
    max_completion_length: int | None,
    train_on_last_step_only: bool,
    is_eval: bool,
) -> dict[str, list[int]]:
    """Tokenize a solution: return its `input_ids`, and `labels` that are -100 but at the last token of a step.

    Args:
        features: `prompt`, `completions` and `labels`.
        tokenizer: Adds no special tokens, but its BOS, if it has one, before the prompt.
        step_separator: Put after each step.
        max_length: Most tokens; those after are cut.
        max_completion_length: The same, of the steps.
        train_on_last_step_only: Whether all labels but the last become -100,
        is_eval: but not in evaluation.
    """
    texts, bos = (step_separator, features["prompt"], *features["completions"]), tokenizer.bos_token_id
    separator_ids, prompt_ids, *steps = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt_ids = [bos] * (bos is not None) + prompt_ids
    input_ids, labels = list[int](), list[int]()
    for place, (ids, label) in enumerate(zip(steps, features["labels"], strict=True), start=1):
        if not ids and not separator_ids:
            raise UserError(
                f"`completions[{place - 1}]` has no tokens, and step_separator={step_separator!r} adds none, so its "
                "label has no place. Remove such steps, or set another step_separator."
            )
        input_ids += ids + separator_ids
        is_left_out = train_on_last_step_only and not is_eval and place < len(steps)
        labels += [NO_LABEL] * (len(input_ids) - len(labels) - 1) + [NO_LABEL if is_left_out else int(label)]
    input_ids = prompt_ids + input_ids[:max_completion_length]
    labels = [NO_LABEL] * len(prompt_ids) + labels[:max_completion_length]
    return {"input_ids": input_ids[:max_length], "labels": labels[:max_length]}
