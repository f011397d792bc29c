"""Checks of rows before training: errors about bad rows, and warnings about columns."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from ..errors import UserError, UserTypeError

Row = Mapping[str, Any]

RAW_COLUMNS = ("chosen", "rejected")
OLD_KEYS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")
"""Names of token columns of pairs, and of the keys of a batch, in TRL up to 0.23."""
_RENDERING_SECONDS = 20.0  # limit for one conversation; most take milliseconds
LARGEST = float(np.finfo(np.float32).max)  # losses are float32


def row_of(index: int, name: str, column: str | None = None) -> str:
    """Return the beginning of an error: the row (its index in the dataset as passed), the dataset and the column."""
    return f"Row {index} of the {name} dataset" + ("" if column is None else f": `{column}`")


# ---- columns


def column_names(dataset: Dataset | IterableDataset, name: str = "given") -> list[str]:
    """Return the dataset's columns; a stream with unknown columns has the columns of its first row.

    Raises:
        UserTypeError: The value is not a dataset.
        UserError: The dataset has no rows.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise UserTypeError(
            f"The {name} dataset must be a `datasets.Dataset` or `datasets.IterableDataset`, got "
            f"`{type(dataset).__name__}`. Make one of a list of rows with `datasets.Dataset.from_list(rows)`."
        )
    columns = dataset.column_names
    if columns is None:
        columns = list(next(iter(dataset), ()))
    if not columns or (isinstance(dataset, Dataset) and not len(dataset)):
        raise UserError(f"The {name} dataset is empty: it needs at least one pair. Check its split, file and filters.")
    return columns


# ---- raw rows


def check_raw_row(row: Mapping[str, Any], answers: Mapping[str, Any], where: str) -> None:
    """Check one row's texts or messages.

    An answer may be empty if the row has a prompt: a model may have returned no text.

    Args:
        row: The row's values by column, with or without a prompt.
        answers: The row's answers by their place in the row, such as the column name.
        where: Beginning of error messages, see `row_of`.

    Raises:
        UserError: A value is null; prompt and answer are both empty; a message has images; the row mixes text and
            messages; or the answers end with different roles.
        UserTypeError: A value is neither text nor a list of messages, or a message has no role or no content.
    """
    parts = {key: row[key] for key in ("prompt",) if key in row} | dict(answers)
    for key, value in parts.items():
        check_conversation(value, f"{where}: `{key}`")
    if len({type(value) for value in parts.values()}) > 1:
        raise UserError(
            f"{where} mixes text and lists of messages in {', '.join(f'`{key}`' for key in parts)}. If the answers "
            "already contain the prompt, drop the column: `dataset.remove_columns('prompt')`."
        )
    for key in answers:
        if not parts.get("prompt") and not parts[key]:
            raise UserError(f"{where}: `{key}` is empty, and there is no prompt. Remove such rows.")
    roles = {key: value[-1]["role"] for key, value in answers.items() if isinstance(value, list) and value}
    if len(set(roles.values())) > 1:
        raise UserError(
            f"{where}: answers must end with messages of one role, since rewards are compared at their last tokens; "
            f"their roles are {roles!s:.200}. Correct the roles, or remove such rows."
        )


def check_conversation(value: Any, where: str) -> None:
    """Check the text or the messages of one column of a row; both may be empty.

    Args:
        value: The value of the column.
        where: Beginning of error messages, see `row_of`.

    Raises:
        UserError: The value is null, a message has images, or a text holds half of a character.
        UserTypeError: The value is neither text nor a list of messages, or a message has no role or no content.
    """
    if value is None:
        raise UserError(f"{where} is null; every row needs a value there. Remove such rows or fill them.")
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, list):
        for message in value:
            _check_message(message, where)
    else:
        raise UserTypeError(f"{where} must be text or a list of messages, got {type(value).__name__}.")


def check_text(text: str, where: str) -> None:
    """Raise UserError if a text holds half of a character (a lone surrogate); tokenizers cannot read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds {text[error.start]!r} at character {error.start}, which is half of a character: the text "
            "was cut inside a character, or its bytes are not UTF-8. Correct or remove the text."
        ) from error


def _check_message(message: Any, where: str) -> None:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    has_content = role and isinstance(role, str) and any(message[key] is not None for key in message if key != "role")
    if not has_content or isinstance(content, int | float):  # a tool call needs no content
        raise UserTypeError(
            f"{where} holds {message!r:.200}. A message is {{'role': ..., 'content': ...}}, both text ('' for "
            "an empty message); rename other keys, such as `from` and `value`."
        )
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            raise UserError(
                f"{where} holds content of the type {part['type']!r}; a reward model here reads text only. Remove "
                "such rows, or such parts of their messages."
            )
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            check_text(text, where)


@contextmanager
def rendering(what: str) -> Iterator[None]:
    """Convert errors of a chat template, or of a row's arguments for the template, into a UserError.

    A template is a program: it may raise anything, or never end. The main thread interrupts it after a while.
    """
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _time_limit() if is_main else nullcontext():
            yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(
            f"{what} cannot be rendered as a chat: {reason}. Correct the row, its `tools` or `chat_template_kwargs`, "
            "or the tokenizer's chat template (`chat_template_path` trains with another)."
        ) from error


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError after `_RENDERING_SECONDS`."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {_RENDERING_SECONDS} seconds")

    # signal() returns None for a handler that was not installed from Python; it cannot be restored
    handler = signal.signal(signal.SIGALRM, interrupt) or signal.SIG_DFL
    pending = signal.setitimer(signal.ITIMER_REAL, _RENDERING_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *pending)
        signal.signal(signal.SIGALRM, handler)


# ---- token ids


def check_ids(ids: Any, where: str, num_embeddings: int) -> None:
    """Check the token ids of one sequence; for an id that is too large, XLA silently reads the table's last row.

    Args:
        ids: The value of the column.
        where: Beginning of error messages, see `row_of`.
        num_embeddings: Rows of the model's embedding table.

    Raises:
        UserError: The list is empty, or an id is negative or too large.
        UserTypeError: The value is not a list of integers.
    """
    if ids is None or len(ids) == 0:
        raise UserError(f"{where} holds no tokens, but rewards are read at the last token. Remove such rows.")
    array = np.asarray(ids)
    if not np.issubdtype(array.dtype, np.integer):
        raise UserTypeError(f"{where} must hold lists of integer token ids, got {ids!r:.80}.")
    outside = array[(array < 0) | (array >= num_embeddings)]
    if len(outside):
        raise UserError(
            f"{where} holds the token id {outside[0]}, but the model's embedding table has {num_embeddings} "
            f"rows (ids 0 to {num_embeddings - 1}). Tokenize with the model's own tokenizer, or after adding tokens "
            "call `model.resize_token_embeddings(len(tokenizer))`."
        )


# ---- labels


def check_margin(value: Any, where: str) -> None:
    """Raise UserError if a target margin is not a finite number."""
    margin = np.asarray(value)
    if margin.dtype.kind not in "iuf" or margin.ndim or not abs(margin) <= LARGEST:
        raise UserError(
            f"{where} is {value!r}. Every `margin` must be a finite number, since it is subtracted from the pair's "
            "reward margin in the loss: fill it with 0, or drop the row or the column."
        )
