"""Scores a stream of rows in windows: memory does not grow with the input, and rows come out in their order."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np

from ..data import checks
from ..data.chat import date_written
from ..data.conversion import convert_row
from ..errors import UserError
from .forms import Dialogue, Form, all_of, tokenize
from .scorer import TOKENS_A_PASS, Scorer

logger = logging.getLogger(__name__)

#: Rows that are tokenized, packed and computed together.
WINDOW = 1024

Row = Mapping[str, Any]

#: Some rows as they came, and with their rewards.
Window = tuple[list[Row | UserError], list[dict[str, Any]]]


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

    What dialogues share is computed once. Rewards equal those of one dialogue at a time to rounding.

    Args:
        model: Folder (or Hub id) of a saved reward model or of its adapters; or a `Scorer`, to load it only once,
            whose own settings then hold.
        rows: Rows of one of the forms in `trl_tpu.scoring.forms`: a dataset, a list, an iterator; or texts, or lists
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
    form, coming = look_at(map(_as_row, rows), best_of_n)
    if not isinstance(model, Scorer):
        settings: dict[str, Any] = {"bf16": bf16, "mesh": mesh, "tokens_per_pass": tokens_per_pass}
        model = Scorer(model, trust_remote_code, standardize=standardize, **settings)
    return chain.from_iterable(scored for _, scored in scored_windows(model, coming, form.of_model(model), max_length))


def _as_row(row: Any) -> Row:
    if isinstance(row, str):
        return {"text": row}
    return {"messages": row} if isinstance(row, list) else row


def look_at(rows: Iterable[Row | UserError], best_only: bool) -> tuple[Form, Iterator[Row | UserError]]:
    """Find out the form of rows by their first one, and return them all.

    Raises:
        UserError: There are none, the first is broken, or its columns cannot be scored.
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
        rows: The rows from the ``first`` on; in the place of a broken one, what is wrong with it.
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
    read = [
        form.read(row, checks.row_of(number, "scored"), scorer.tokenizer) for number, row in enumerate(rows, first)
    ]
    ready = tokenize([item for items in read for item in all_of(items)], scorer, max_length)
    chats = ((item.dialogue, item.row) for item, _ in ready if isinstance(item.dialogue, list))
    date_written(scorer.tokenizer, chats)  # for its warning
    rewards = scorer.start([ids for _, ids in ready])

    def written() -> Window:
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

    return written
