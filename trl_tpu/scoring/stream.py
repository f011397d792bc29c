"""Rows of many forms with their rewards, in windows, so that memory does not grow with their number.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from ..data import checks
from ..data.chat_templates import date_written
from ..data.formats import convert_row
from ..data.length_stats import NO_LABEL
from ..data.solutions import check_solution, tokenize_solution
from ..data.tokenize import tokenize_dialogue
from ..errors import UserError
from .scorer import TOKENS_A_PASS, Scorer

logger = logging.getLogger(__name__)

#: Rows that are tokenized, packed and computed together.
WINDOW = 1024

#: The column that says why a row has no reward, or lacks some; null in others.
REASON = "not_scored"

Row = Mapping[str, Any]
Dialogue = str | list[dict[str, Any]] | np.ndarray

# of each form the columns of dialogues, each with those of their rewards and numbers of tokens
_FORMS = (
    {"chosen": ("reward_chosen", "tokens_chosen"), "rejected": ("reward_rejected", "tokens_rejected")},
    {"completions": ("rewards", "tokens")},
    {"messages": ("reward", "tokens")},
    {"text": ("reward", "tokens")},
)


@dataclass
class Item:
    """One dialogue of a row, and the results for it."""

    row: Row
    where: str
    """The beginning of errors: its row and column, and its place there."""
    dialogue: Dialogue | None = None
    tokens: int | None = None
    reward: float | None = None
    by_attribute: dict[str, float] | None = None
    """The rewards of a model's attributes, by name."""
    fault: str | None = None
    """Why it has no reward."""


#: The dialogues of a row by their columns: one, or a list where the row has a list of answers.
Items = dict[str, Item | list[Item]]

#: Some rows as they came, and with their rewards.
Window = tuple[list[Row | UserError], list[dict[str, Any]]]


@dataclass(frozen=True)
class Form:
    """Columns of a row that hold dialogues, and the columns that are written.

    Args:
        outputs: By the columns of dialogues, those of their rewards and of their numbers of tokens.
        best_only: Whether only the best of a row's completions is kept.
        columns: All that the rows have.
        step_separator: What follows each step, for a model that scores steps.
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
        present = list(columns)
        forms = _FORMS[best_only and "completions" in present :]
        found = next((form for form in forms if form.keys() <= set(present)), None)
        if found is None:
            raise UserError(
                "Rows to score need the columns chosen and rejected (answers, or lists of answers), or completions (a "
                f"list of answers), each perhaps with prompt; or messages, or text; they have {present}."
            )
        if best_only and "completions" not in found:
            raise UserError(
                f"The best answer is chosen from a column completions (a list of answers); the rows have {present}."
            )
        return cls({"completions": ("reward", "tokens")} if best_only else found, best_only, present)

    def of_model(self, scorer: Scorer) -> "Form":
        """Return the form in which a model reads such rows, and warn of columns that it overwrites.

        Raises:
            UserError: The model scores steps, and the rows have none; or they can be read in two ways.
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

    def read(self, row: Row | UserError, where: str, tokenizer: Any) -> Items:
        """Read the dialogues of a row; an invalid one gets a fault.

        Args:
            row: Or what is wrong with it.
            where: The beginning of errors.
            tokenizer: Has the token that ends texts.
        """
        if isinstance(row, UserError):
            return {column: Item({}, where, fault=str(row)) for column in self.outputs}
        if self.step_separator is not None:
            return {"completions": _steps(row, f"{where}: `completions", tokenizer, self.step_separator)}
        row = convert_row(row)[0]
        items: Items = {}
        for column in self.outputs:
            answer, place = row.get(column), f"{where}: `{column}"
            prompt = None if column in ("messages", "text") else row.get("prompt")
            if isinstance(answer, list) and (column == "completions" or (answer and not isinstance(answer[0], dict))):
                items[column] = [
                    _read(row, prompt, each, f"{place}[{n}]`", tokenizer) for n, each in enumerate(answer)
                ]
            elif column == "completions":
                items[column] = Item(row, place, fault=f"{place}` must be a list of answers, got {answer!r:.80}")
            else:
                items[column] = _read(row, prompt, answer, f"{place}`", tokenizer)
        return items

    def written(self, row: Row, items: Items, has_attributes: bool = False) -> dict[str, Any]:
        """Return the row with its rewards, numbers of tokens, and the reason where it lacks any of them.

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


def _read(row: Row, prompt: Any, answer: Any, where: str, tokenizer: Any) -> Item:
    """Read an answer after a prompt, if there is one; a text gets the EOS at its end, as in training."""
    try:
        checks.check_dialogue(answer, where)
        dialogue = checks.with_eos(answer, tokenizer)
        if prompt is not None:
            if type(prompt) is not type(answer):
                raise UserError(f"{where} and `prompt` must both be texts, or lists of messages.")
            checks.check_dialogue(prompt, f"{where} after `prompt`, which")
            dialogue = prompt + dialogue
    except UserError as error:
        return Item(row, where, fault=str(error))
    return Item(row, where, dialogue)


def _steps(row: Row, where: str, tokenizer: Any, step_separator: str) -> Item | list[Item]:
    """Read the solution of a row: the dialogues up to the end of each step, as token ids."""
    try:
        check_solution(row, where.rpartition(":")[0])
        steps, how = row["completions"], (None, None, False, True)  # nothing is truncated
        solution = tokenize_solution({**row, "labels": [0] * len(steps)}, tokenizer, step_separator, *how)
    except UserError as error:
        return Item(row, where, fault=str(error))
    ids = np.asarray(solution["input_ids"], np.int32)
    ends = np.flatnonzero(np.asarray(solution["labels"]) != NO_LABEL)
    return [Item(row, f"{where}[{place}]`", ids[: end + 1]) for place, end in enumerate(ends)]


def tokenize(items: list[Item], scorer: Scorer, max_length: int | None) -> list[tuple[Item, np.ndarray]]:
    """Tokenize dialogues as in training, and return those that can be scored; the others get a fault.

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
            ids: Any = item.dialogue
            if isinstance(ids, str):
                ids = next(tokenized)
            elif isinstance(ids, list):
                ids = tokenize_dialogue(ids, scorer.tokenizer, item.row, item.where)
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


def score(
    model: str | Scorer,
    rows: Iterable[Row | Dialogue],
    *,
    max_length: int | None = None,
    best_of_n: bool = False,
    bf16: bool = False,
    mesh: str = "fsdp=-1",
    tokens_per_pass: int = TOKENS_A_PASS,
    standardize: bool = False,
    trust_remote_code: bool = False,
) -> Iterator[dict[str, Any]]:
    """Score rows with a saved reward model on the device that training would take, as many as there are.

    Tokens that dialogues share are computed once. Rewards equal those of one dialogue at a time to rounding.

    Args:
        model: Folder (or Hub id) of a saved reward model or of its adapters; or a `Scorer`, to load it only once,
            whose own settings then hold.
        rows: Rows of one of the forms in `trl_tpu.scoring.stream`: a dataset, a list, an iterator; or texts, or lists
            of messages.
        max_length: Dialogues of more tokens get no reward, as training leaves them out; no limit when None.
        best_of_n: Whether only the best of each row's ``completions`` is kept, as ``completion`` and ``reward``.
        bf16: Whether to compute in bfloat16, over float32 weights.
        mesh: How the devices of PyTorch/XLA share the weights, as in training.
        tokens_per_pass: Tokens that each device computes at a time.
        standardize: Whether rewards are ``(reward - mean) / std``, by the mean and std in the model's config.
        trust_remote_code: Whether the model may bring its own code.

    Returns:
        An iterator over the rows in their order, each with rewards, numbers of tokens, and in ``not_scored`` what
        keeps it from having a reward, which then is None.

    Raises:
        UserError: No rows, or columns that cannot be scored; a folder that holds no saved reward model.
    """
    named: Iterable[Any] = (
        {"text" if isinstance(row, str) else "messages": row} if isinstance(row, str | list) else row for row in rows
    )
    form, coming = look_at(named, best_of_n)
    if not isinstance(model, Scorer):
        settings: dict[str, Any] = {"bf16": bf16, "mesh": mesh, "tokens_per_pass": tokens_per_pass}
        model = Scorer(model, trust_remote_code, standardize=standardize, **settings)
    return chain.from_iterable(scored for _, scored in scored_windows(model, coming, form.of_model(model), max_length))


def look_at(rows: Iterable[Any], best_only: bool) -> tuple[Form, Iterator[Row | UserError]]:
    """Find the form of rows by their first one, and return them all.

    Args:
        rows: In the place of an invalid one, what is wrong with it.

    Raises:
        UserError: There are none, the first is invalid, or its columns cannot be scored.
    """
    coming = iter(rows)
    first = next(coming, None)
    if first is None:
        raise UserError("There are no rows to score.")
    if isinstance(first, UserError):
        raise first
    converted, forms = convert_row(first)
    if forms:
        logger.warning(f"In the rows to score, there are {', '.join(forms)}.")
    return Form.of({**first, **converted}, best_only), chain([first], coming)


def scored_windows(
    scorer: Scorer, rows: Iterable[Row | UserError], form: Form, max_length: int | None = None, first: int = 0
) -> Iterator[Window]:
    """Yield `WINDOW` rows at a time, as they came, and with their rewards.

    Args:
        scorer: The model.
        rows: The rows from the ``first`` on; in the place of an invalid one, what is wrong with it.
        form: Of the rows.
        max_length: Most tokens of a dialogue that gets a reward; no limit when None.
        first: The number of the first row.
    """
    coming = iter(rows)
    computing: list[Callable[[], Window]] = []
    while some := list(islice(coming, WINDOW)):
        computing.append(_start(scorer, some, form, max_length, first))
        first += len(some)
        # a device computes this window while the next one is tokenized
        if len(computing) > (scorer.device.type != "cpu"):
            yield computing.pop(0)()
    for window in computing:
        yield window()


def _start(
    scorer: Scorer, rows: list[Row | UserError], form: Form, max_length: int | None, first: int
) -> Callable[[], Window]:
    """Start to compute the rewards of a window; the function that is returned waits for them."""
    read = [
        form.read(row, checks.row_of(number, "scored"), scorer.tokenizer) for number, row in enumerate(rows, first)
    ]
    ready = tokenize([item for items in read for item in all_of(items)], scorer, max_length)
    chats = ((item.dialogue, item.row) for item, _ in ready if isinstance(item.dialogue, list))
    date_written(scorer.tokenizer, chats)  # for its warning
    rewards = scorer.start([ids for _, ids in ready])

    def finish() -> Window:
        for (item, _), (reward, *by_attribute) in zip(ready, rewards().tolist(), strict=True):
            if np.isfinite(reward):
                item.reward = reward
                item.by_attribute = dict(zip(scorer.outputs.attributes, by_attribute, strict=True))
            else:
                item.fault = f"{item.where}: the reward is {reward}, which the model computes there"
        return rows, [
            form.written({} if isinstance(row, UserError) else row, items, bool(scorer.outputs.attributes))
            for row, items in zip(rows, read, strict=True)
        ]

    return finish
