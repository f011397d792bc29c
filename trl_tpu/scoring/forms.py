"""What a row asks for, by its columns: which dialogues it holds, and the columns that their rewards get.

==========================  ==============================================  =======================================
columns                     dialogues                                       rewards, tokens
==========================  ==============================================  =======================================
chosen, rejected            a pair, in any form that training takes         reward_chosen, ..., tokens_chosen, ...
chosen, rejected as lists   several answers each, as in RewardBench 2       the same, lists
completions                 a list of answers                               rewards, tokens: lists
completions                 the steps of a solution, of a model of steps    step_rewards, tokens: lists
messages                    a conversation                                  reward, tokens
text                        a text                                          reward, tokens
==========================  ==============================================  =======================================

A ``prompt`` is put before the answers of the first three; ``tools`` and ``chat_template_kwargs`` are for the template.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data import checks
from ..data.formats import convert_row
from ..data.measure import NO_LABEL
from ..data.solutions import check_solution, tokenize_solution
from ..data.tokenize import tokenize_dialogue, with_eos
from ..errors import UserError
from .scorer import Scorer

logger = logging.getLogger(__name__)

Dialogue = str | list[dict[str, Any]] | np.ndarray

#: The column that says why a row has no reward, or lacks some; null in others.
REASON = "not_scored"

# of each form the columns of dialogues, each with those of their rewards and numbers of tokens
_FORMS = (
    {"chosen": ("reward_chosen", "tokens_chosen"), "rejected": ("reward_rejected", "tokens_rejected")},
    {"completions": ("rewards", "tokens")},
    {"messages": ("reward", "tokens")},
    {"text": ("reward", "tokens")},
)
_BEST = {"completions": ("reward", "tokens")}
_ACCEPTED = (
    "the columns chosen and rejected (answers, or lists of answers), or completions (a list of answers), each perhaps "
    "with prompt; or messages, or text"
)


@dataclass
class Item:
    """One dialogue of a row, and what is found out about it."""

    row: Mapping[str, Any]
    where: str
    """How errors begin: its row and column, and its place there."""
    dialogue: Dialogue | None = None
    tokens: int | None = None
    reward: float | None = None
    by_attribute: dict[str, float] | None = None
    """The rewards of a model's attributes, by name."""
    fault: str | None = None
    """Why it has no reward."""


#: The dialogues of a row by their columns: one, or a list where the row has a list of answers.
Items = dict[str, Item | list[Item]]


@dataclass(frozen=True)
class Form:
    """Which columns of a row hold dialogues, and what is written of them.

    Args:
        outputs: By the columns of dialogues, those of their rewards and of their numbers of tokens.
        best_only: Whether only the best of a row's completions is kept.
        columns: All that the rows have.
        step_separator: What follows each step that a model judges, of which each is a dialogue's end.
    """

    outputs: Mapping[str, tuple[str, str]]
    best_only: bool = False
    columns: Sequence[str] = ()
    step_separator: str | None = None

    @classmethod
    def of(cls, columns: Iterable[str], best_only: bool = False) -> "Form":
        """Find the form of rows that have these columns.

        Raises:
            UserError: They have no form that can be scored, or no completions to choose the best of.
        """
        there = list(columns)
        forms = _FORMS[best_only and "completions" in there :]
        found = next((form for form in forms if form.keys() <= set(there)), None)
        if found is None:
            raise UserError(f"Rows to score need {_ACCEPTED}; they have {there}.")
        if best_only and "completions" not in found:
            raise UserError(
                f"The best answer is chosen from a column completions (a list of answers); the rows have {there}."
            )
        return cls(_BEST if best_only else found, best_only, there)

    def of_model(self, scorer: Scorer) -> "Form":
        """Return the form in which a model reads such rows, and say which of their columns it writes anew.

        Raises:
            UserError: The model judges steps, and the rows have none; or they can be read in two ways.
        """
        form, separator = self, scorer.outputs.step_separator
        if separator is None and not self.best_only:
            checks.check_one_form(self.columns, "The dataset")
        if separator is not None:
            if self.best_only or "completions" not in self.columns:
                raise UserError(
                    "The model judges steps, so rows need `prompt` and `completions`, the steps of one solution, of "
                    "which none is the best."
                )
            form = Form({"completions": ("step_rewards", "tokens")}, False, self.columns, separator)
        # the names of all columns that `written` adds to a row
        empty: Items = {column: Item({}, "") for column in form.outputs}
        if replaced := form.written({}, empty, bool(scorer.outputs.attributes)).keys() & set(self.columns):
            logger.warning(f"The output has new columns in place of the dataset's: {', '.join(sorted(replaced))}.")
        return form

    def read(self, row: Mapping[str, Any] | UserError, where: str, tokenizer: Any) -> Items:
        """Find the dialogues of a row; those that are broken say why.

        Args:
            row: Or what is wrong with it.
            where: How errors begin.
            tokenizer: Has the token that ends texts.
        """
        if isinstance(row, UserError):
            return {column: Item({}, where, fault=str(row)) for column in self.outputs}
        row = row if self.step_separator is not None else convert_row(row)[0]
        items: Items = {}
        for column in self.outputs:
            value, place = row.get(column), f"{where}: `{column}"
            settings = {"tokenizer": tokenizer, "has_prompt": "prompt" in row and column not in ("messages", "text")}
            if self.step_separator is not None:
                items[column] = _steps(row, place, tokenizer, self.step_separator)
            elif isinstance(value, list) and (column == "completions" or (value and not isinstance(value[0], dict))):
                items[column] = [_read(row, each, f"{place}[{n}]`", **settings) for n, each in enumerate(value)]
            elif column == "completions":
                items[column] = Item(row, place, fault=f"{place}` must be a list of answers, got {value!r:.80}")
            else:
                items[column] = _read(row, value, f"{place}`", **settings)
        return items

    def written(self, row: Mapping[str, Any], items: Items, has_attributes: bool = False) -> dict[str, Any]:
        """Return the row with its rewards, numbers of tokens, and what keeps it from having all of them.

        Where a model has attributes, their rewards are in the columns of rewards' names and ``_by_attribute``.
        """
        every = all_of(items)
        faults = list(dict.fromkeys(item.fault for item in every if item.fault))
        more = f" ({len(faults) - 1} more of its dialogues have none either)" if len(faults) > 1 else ""
        written = dict(row)
        if self.best_only:
            answers = written.pop("completions", None)
            rewards = {place: item.reward for place, item in enumerate(every) if item.reward is not None}
            best = max(rewards, key=rewards.__getitem__, default=None)  # the first of equals
            written["completion"] = None if best is None else answers[best]
            items = {"completions": Item(row, "") if best is None else every[best]}
        for column, (reward, tokens) in self.outputs.items():
            found = items[column]
            columns = {"reward": reward, "tokens": tokens}
            columns |= {"by_attribute": f"{reward}_by_attribute"} if has_attributes else {}
            for of, name in columns.items():
                values = [getattr(item, of) for item in (found if isinstance(found, list) else [found])]
                written[name] = values if isinstance(found, list) else values[0]
        return written | {REASON: f"{faults[0]}{more}" if faults else None}


def all_of(items: Items) -> list[Item]:
    """Return a row's dialogues without their columns."""
    return [item for each in items.values() for item in (each if isinstance(each, list) else [each])]


def _read(row: Mapping[str, Any], answer: Any, where: str, tokenizer: Any, has_prompt: bool) -> Item:
    """Read an answer after the row's prompt, if it has one; a text with its end, as training has it."""
    try:
        checks.check_dialogue(answer, where)
        dialogue = with_eos(answer, tokenizer)
        if has_prompt:
            if type(row["prompt"]) is not type(answer):
                raise UserError(f"{where} and `prompt` must both be texts, or lists of messages.")
            checks.check_dialogue(row["prompt"], f"{where} after `prompt`, which")
            dialogue = row["prompt"] + dialogue
    except UserError as error:
        return Item(row, where, fault=str(error))
    return Item(row, where, dialogue)


def _steps(row: Mapping[str, Any], where: str, tokenizer: Any, step_separator: str) -> Item | list[Item]:
    """Read the solution of a row: the dialogues up to the end of each step, as token ids."""
    try:
        check_solution(row, where.rpartition(":")[0])
        steps, how = row["completions"], (None, None, False, True)  # nothing is cut
        solution = tokenize_solution({**row, "labels": [0] * len(steps)}, tokenizer, step_separator, *how)
    except UserError as error:
        return Item(row, where, fault=str(error))
    ids = np.asarray(solution["input_ids"], np.int32)
    ends = np.flatnonzero(np.asarray(solution["labels"]) != NO_LABEL)
    return [Item(row, f"{where}[{place}]`", ids[: end + 1]) for place, end in enumerate(ends)]


def tokenize(items: list[Item], scorer: Scorer, max_length: int | None) -> list[tuple[Item, np.ndarray]]:
    """Tokenize dialogues as training does, and return those that can be scored; the others say why.

    Args:
        items: The dialogues of some rows.
        scorer: Has the tokenizer.
        max_length: Most tokens of a dialogue; no limit when None.
    """
    texts = [item.dialogue for item in items if isinstance(item.dialogue, str)]
    # together: a tokenizer takes many texts at once much faster than one by one
    tokenized = iter(scorer.tokenizer(text=texts, return_attention_mask=False)["input_ids"] if texts else [])
    ready = []
    for item in items:
        if item.dialogue is None:
            continue
        try:
            if isinstance(item.dialogue, str):
                ids = next(tokenized)
            elif isinstance(item.dialogue, list):
                ids = tokenize_dialogue(item.dialogue, scorer.tokenizer, item.row, item.where)
            else:
                ids = item.dialogue
            checks.check_ids(ids, item.where, scorer.num_embeddings)
            item.tokens = len(ids)
            if max_length is not None and len(ids) > max_length:
                raise UserError(f"{item.where} has {len(ids)} tokens, more than max_length={max_length}")
            if len(ids) > scorer.positions:
                raise UserError(
                    f"{item.where} has {len(ids)} tokens, but the model has learned {scorer.positions} positions"
                )
        except UserError as error:
            item.fault = str(error)
        else:
            ready.append((item, np.asarray(ids, np.int32)))
    return ready
