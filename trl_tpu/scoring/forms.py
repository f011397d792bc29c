"""What a row asks for, by its columns: which dialogues it holds, and the columns that their rewards get.

==========================  ==============================================  =======================================
columns                     dialogues                                       rewards, tokens
==========================  ==============================================  =======================================
chosen, rejected            a pair, in any form that training takes         reward_chosen, ..., tokens_chosen, ...
chosen, rejected as lists   several answers each, as in RewardBench 2       the same, lists
completions                 a list of answers                               rewards, tokens: lists
messages                    a conversation                                  reward, tokens
text                        a text                                          reward, tokens
==========================  ==============================================  =======================================

A ``prompt`` is put before the answers of the first three; ``tools`` and ``chat_template_kwargs`` are for the template.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data import checks
from ..data.tokenize import tokenize_dialogue, with_eos
from ..errors import UserError, UserTypeError
from .scorer import Scorer

logger = logging.getLogger(__name__)

Dialogue = str | list[dict[str, Any]]

#: The column that says why a row has no reward, or lacks some; null in others.
REASON = "not_scored"

_FORMS = (checks.RAW_COLUMNS, ("completions",), ("messages",), ("text",))
_ACCEPTED = (
    "the columns chosen and rejected (answers, or lists of answers), or completions (a list of answers), each perhaps "
    "with prompt; or messages, or text"
)


@dataclass(frozen=True)
class Form:
    """Which columns of a row hold dialogues.

    Args:
        columns: The columns.
        best_only: Whether only the best of a row's completions is kept.
    """

    columns: tuple[str, ...]
    best_only: bool = False

    @classmethod
    def of(cls, columns: Iterable[str], best_only: bool = False) -> "Form":
        """Find the form of rows that have these columns.

        Raises:
            UserError: They have no form that can be scored, or no completions to choose the best of.
        """
        there = list(columns)
        found = next((form for form in _FORMS if set(form) <= set(there)), None)
        if found is None:
            raise UserError(f"Rows to score need {_ACCEPTED}; they have {there}.")
        if best_only and found != ("completions",):
            raise UserError(
                f"The best answer is chosen from a column completions (a list of answers); the rows have {there}."
            )
        form = cls(found, best_only)
        new = {*form.reward_columns.values(), *form.token_columns.values(), REASON}
        if replaced := new & set(there):
            logger.warning(f"The output has new columns in place of the dataset's: {', '.join(sorted(replaced))}.")
        return form

    @property
    def reward_columns(self) -> dict[str, str]:
        """The column of the rewards for each column of dialogues."""
        plain = "rewards" if self.columns == ("completions",) and not self.best_only else "reward"
        return {each: f"reward_{each}" if each in checks.RAW_COLUMNS else plain for each in self.columns}

    @property
    def token_columns(self) -> dict[str, str]:
        """The column of the numbers of tokens for each column of dialogues."""
        return {each: f"tokens_{each}" if each in checks.RAW_COLUMNS else "tokens" for each in self.columns}


@dataclass
class Item:
    """One dialogue of a row, and what is found out about it."""

    dialogue: Dialogue | None
    row: str
    """How errors call its row."""
    name: str
    """The column that it is in, and its place there."""
    ids: np.ndarray | None = None
    reward: float | None = None
    fault: str | None = None
    """Why it has no reward."""

    @property
    def where(self) -> str:
        """How errors begin."""
        return f"{self.row}: `{self.name}`"

    @property
    def tokens(self) -> int | None:
        return None if self.ids is None else len(self.ids)


@dataclass
class RowDialogues:
    """A row, and its dialogues by their columns: one, or a list where the row has a list of answers."""

    row: Mapping[str, Any]
    form: Form
    items: dict[str, Item | list[Item]] = field(default_factory=dict)
    fault: str | None = None
    """Why none of it can be scored."""

    @classmethod
    def read(cls, row: "Mapping[str, Any] | UserError", form: Form, where: str, tokenizer: Any) -> "RowDialogues":
        """Find the dialogues of a row; one that is broken says why.

        Args:
            row: Or what is wrong with it.
            where: How errors begin.
            tokenizer: Has the token that ends texts.
        """
        if isinstance(row, UserError):
            return cls({}, form, fault=str(row))
        try:
            return cls(row, form, _items(row, form, where, tokenizer))
        except UserError as error:
            return cls(row, form, fault=str(error))

    def __iter__(self) -> Iterator[Item]:
        """Yield its dialogues."""
        for items in self.items.values():
            yield from items if isinstance(items, list) else [items]

    def scored(self) -> dict[str, Any]:
        """Return the row with its rewards, numbers of tokens, and what keeps it from having all of them."""
        faults = [self.fault] if self.fault else [item.fault for item in self if item.fault]
        more = f" ({len(faults) - 1} more of its dialogues have none either)" if len(faults) > 1 else ""
        reason = {REASON: f"{faults[0]}{more}" if faults else None}
        if self.form.best_only:
            return self._best() | reason
        rewards = {to: self._column(column, "reward") for column, to in self.form.reward_columns.items()}
        tokens = {to: self._column(column, "tokens") for column, to in self.form.token_columns.items()}
        return {**self.row, **rewards, **tokens, **reason}

    def _column(self, column: str, of: str) -> Any:
        items = self.items.get(column)
        return [getattr(item, of) for item in items] if isinstance(items, list) else getattr(items, of, None)

    def _best(self) -> dict[str, Any]:
        """Return the row with the first of its answers that has the highest reward in the place of all of them."""
        others = {key: value for key, value in self.row.items() if key != "completions"}
        scored = [(item.reward, -place, item.tokens) for place, item in enumerate(self) if item.reward is not None]
        if not scored:
            return {**others, "completion": None, "reward": None, "tokens": None}
        reward, place, tokens = max(scored)
        return {**others, "completion": self.row["completions"][-place], "reward": reward, "tokens": tokens}


# ---- rows


def _items(row: Mapping[str, Any], form: Form, where: str, tokenizer: Any) -> dict[str, Item | list[Item]]:
    if missing := [column for column in form.columns if column not in row]:
        raise UserError(f"{where} has no `{missing[0]}`; the first row has {' and '.join(form.columns)}.")
    if form.columns == ("completions",) or any(_is_answers(row[column]) for column in form.columns):
        return {column: _answers(row, column, where, tokenizer) for column in form.columns}
    if form.columns == checks.RAW_COLUMNS:
        checks.check_raw_row(row, where)
    else:
        checks.check_dialogue(row[form.columns[0]], form.columns[0], where)
    given = row if form.columns == checks.RAW_COLUMNS else {}  # a prompt is for answers
    return {key: Item(_whole(given, row[key], tokenizer), where, key) for key in form.columns}


def _is_answers(value: Any) -> bool:
    """Tell a list of answers from an answer: a text, or a list of messages."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], dict)


def _answers(row: Mapping[str, Any], column: str, where: str, tokenizer: Any) -> list[Item]:
    answers = row[column]
    if not _is_answers(answers):
        raise UserTypeError(
            f"{where}: `{column}` must be a list of answers, each a text or a list of messages, got {answers!r:.80}."
        )
    items = [Item(None, where, f"{column}[{n}]") for n in range(len(answers))]
    for item, answer in zip(items, answers, strict=True):
        try:
            checks.check_dialogue(answer, item.name, where)
            if type(row.get("prompt", answer)) is not type(answer):
                raise UserError(f"{item.where} and `prompt` must both be texts, or lists of messages.")
            item.dialogue = _whole(row, answer, tokenizer)
        except UserError as error:
            item.fault = str(error)
    return items


def _whole(row: Mapping[str, Any], answer: Any, tokenizer: Any) -> Dialogue:
    """Return an answer after the row's prompt, if there is one; a text with its end, as training has it."""
    ended = with_eos(answer, tokenizer)
    return row["prompt"] + ended if "prompt" in row else ended


# ---- tokens


def tokenize(rows: list[RowDialogues], scorer: Scorer, max_length: int | None) -> list[Item]:
    """Tokenize the dialogues of some rows as training does, and return those that can be scored; the others say why.

    Args:
        rows: The rows.
        scorer: Has the tokenizer.
        max_length: Most tokens of a dialogue; no limit when None.
    """
    here = [(row.row, item, item.dialogue) for row in rows for item in row if item.dialogue is not None]
    texts = [dialogue for *_, dialogue in here if isinstance(dialogue, str)]
    # together: a tokenizer takes many texts at once much faster than one by one
    tokenized = iter(scorer.tokenizer(text=texts, return_attention_mask=False)["input_ids"] if texts else [])
    for row, item, dialogue in here:
        try:
            is_text = isinstance(dialogue, str)
            ids = next(tokenized) if is_text else tokenize_dialogue(dialogue, scorer.tokenizer, row, item.where)
            checks.check_ids(ids, item.name, item.row, scorer.num_embeddings)
        except UserError as error:
            item.fault = str(error)
            continue
        item.ids = np.asarray(ids, np.int32)
        if max_length is not None and len(ids) > max_length:
            item.fault = f"{item.where} has {len(ids)} tokens, more than max_length={max_length}"
        elif len(ids) > scorer.positions:
            item.fault = f"{item.where} has {len(ids)} tokens, but the model has learned {scorer.positions} positions"
    return [item for _, item, _ in here if item.fault is None]
