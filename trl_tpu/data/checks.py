"""Checks of rows before training: errors about bad rows, and warnings about traps.

A trap is a raw row that is valid but probably a mistake. Each trap is logged once, with its number of rows.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from ..errors import UserError, UserTypeError
from .formats import texts_of

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

RAW_COLUMNS = ("chosen", "rejected")
#: Names of token columns of pairs, and of the keys of a batch, in TRL up to 0.23.
OLD_KEYS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")
LARGEST = float(np.finfo(np.float32).max)  # losses are float32


def is_number(value: Any) -> bool:
    """Check for a number that float32 can hold; bools are no numbers."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and abs(float(value)) <= LARGEST


def row_of(index: int, name: str, column: str | None = None) -> str:
    """Return the beginning of an error: the row (its index in the dataset as passed), the dataset and the column."""
    return f"Row {index} of the {name} dataset" + ("" if column is None else f": `{column}`")


# ---- columns


def column_names(dataset: Dataset | IterableDataset, name: str = "given") -> list[str]:
    """Return the dataset's columns; a stream with unknown columns has the columns of its first row.

    Raises:
        UserError: The dataset has no rows.
    """
    columns = dataset.column_names or list(next(iter(dataset), ()))
    if not columns or (isinstance(dataset, Dataset) and not len(dataset)):
        raise UserError(f"The {name} dataset is empty: it needs at least one row. Check its split, file and filters.")
    return columns


# ---- raw rows


def check_raw_row(row: Mapping[str, Any], answers: Mapping[str, Any], where: str) -> None:
    """Check one row's texts or messages.

    An answer may be empty: a model may have returned no text.

    Args:
        row: The row's values by column, with or without a prompt.
        answers: The row's answers by their place in the row, such as the column name.
        where: Beginning of error messages, see `row_of`.

    Raises:
        UserError: The row mixes text and messages; the answers end with different roles; or a value is bad, see
            `check_conversation`.
    """
    parts = {key: row[key] for key in ("prompt",) if key in row} | dict(answers)
    for key, value in parts.items():
        check_conversation(value, f"{where}: `{key}`")
    if len({type(value) for value in parts.values()}) > 1:
        raise UserError(
            f"{where} mixes text and lists of messages in {', '.join(f'`{key}`' for key in parts)}. If the answers "
            "already contain the prompt, drop the column: `dataset.remove_columns('prompt')`."
        )
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
        UserError: A message has images, or a text holds half of a character.
        UserTypeError: The value is neither text nor a list of messages, or a message has no role or no content.
    """
    if not isinstance(value, str | list):
        raise UserTypeError(f"{where} must be text or a list of messages, got {value!r:.80}. Remove such rows.")
    for message in value if isinstance(value, list) else ():
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or all(message[key] is None for key in message if key != "role"):
            raise UserTypeError(  # a tool call needs no content
                f"{where} holds {message!r:.200}. A message is {{'role': ..., 'content': ...}}, both text ('' for "
                "an empty message); rename other keys, such as `from` and `value`."
            )
        parts = content if isinstance(content := message.get("content"), list) else []
        if any(isinstance(part, dict) and part.get("type") not in (None, "text") for part in parts):
            raise UserError(f"{where} holds {parts!r:.200}; a reward model reads text only. Remove such rows.")
    check_text(value, where)


def check_text(value: Any, where: str) -> None:
    """Raise UserError if a text or messages hold half of a character (a lone surrogate); tokenizers cannot read it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds {error.object[error.start]!r}, which is half of a character: the text was cut inside a "
            "character, or its bytes are not UTF-8. Correct or remove the text."
        ) from error


# ---- token ids


def check_ids(ids: Any, where: str, num_embeddings: int) -> None:
    """Check the token ids of one sequence; for an id that is too large, XLA silently reads the table's last row.

    Args:
        ids: The value of the column.
        where: Beginning of error messages, see `row_of`.
        num_embeddings: Rows of the model's embedding table.

    Raises:
        UserError: An id is negative or too large.
        UserTypeError: The value is not a list of integers, or is empty.
    """
    array = np.asarray([] if ids is None else ids)
    if array.dtype.kind not in "iu" or not len(array):  # rewards are read at the last token
        raise UserTypeError(f"{where} must hold a list of integers, at least one token id; got {ids!r:.80}.")
    outside = array[(array < 0) | (array >= num_embeddings)]
    if len(outside):
        raise UserError(
            f"{where} holds the token id {outside[0]}, but the model's embedding table has {num_embeddings} rows. "
            "Tokenize with the model's own tokenizer, or after adding tokens call "
            "`model.resize_token_embeddings(len(tokenizer))`."
        )


# ---- traps

#: Column for each row's traps, one per line. Tokenization adds it, and `warn_of_traps` removes it.
TRAPS = "trl_tpu_traps"

# Columns whose text usually belongs to a conversation, unlike the text of ids, sources, languages or critiques.
_TEXT_COLUMN = re.compile(
    "(?i)(.*_)?(system(_prompt|_message)?|history|contexts?|instructions?|inputs?|query|question|messages|tools|"
    "conversations?|dialog(ue)?|trajectory|documents?|passages?)"
)
_WORD = re.compile(r"\w+|[^\w\s]", re.ASCII)  # ASCII: languages without spaces have no words here
# keys of messages, and variables, that some chat templates write
_OTHER_PARTS = ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "tools", "documents")
_SHORTEST_PROMPT = 10  # characters; answers may begin with a shorter prompt by chance

_WARNINGS = {
    "column": "the text of {} is not read. Put it into a column `prompt` (a text, or messages that begin with a "
    "system prompt, in the role `system`) or into all answers, or drop the column",
    "beside": "the `{}` is not read, because `messages` and `text` hold whole conversations. Put it into them, or "
    "rename that column to `completion`, which is read after the prompt",
    "template": "the chat template does not write {}. Use a template that does (in training, `chat_template_path`), "
    "move the text to messages that it writes, or remove it",
    "prompt": "all answers begin with the `prompt`, so the prompt is read twice. Drop the column, "
    "`dataset.remove_columns('prompt')`",
    "form": "there are {}. Convert the rows yourself if that is wrong",
    "same": "chosen and rejected have the same tokens, so they teach nothing. Remove such rows",
    "truncation": "truncation removed {}. Raise `max_length` and `max_completion_length`, or remove such rows",
    "bos": "the text begins with {}, and the tokenizer adds another. Remove it from the text",
    "eos": "the text ends with {} and white space, so another is added. Strip the text",
}


def find_traps(row: Row, answers: list[Any], ids: list[list[int]], tokenizer: Any) -> list[str]:
    """Return the traps of a row: for each the key of a warning, and a name to insert into its text.

    Args:
        row: A converted row.
        answers: The row's answers, as texts or messages.
        ids: Token ids of each answer with its prompt.
        tokenizer: The tokenizer of these ids.
    """
    prompt, eos, bos = row.get("prompt") or "", tokenizer.eos_token, tokenizer.bos_token
    traps = unread_columns(row, prompt, answers)
    if all(isinstance(answer, str) for answer in answers):
        begin = prompt.strip()
        is_double = len(begin) >= _SHORTEST_PROMPT and all(answer.lstrip().startswith(begin) for answer in answers)
        if bos and (prompt or answers[0]).startswith(bos) and [*ids[0][:2]] == [tokenizer.bos_token_id] * 2:
            traps.append(f"bos {bos}")
        if eos and any(answer.rstrip().endswith(eos) and not answer.endswith(eos) for answer in answers):
            traps.append(f"eos {eos}")
    else:
        is_double = bool(prompt) and all(answer[: len(prompt)] == prompt for answer in answers)
    return traps + ["prompt twice"] * is_double


def unread_columns(row: Row, prompt: Any, answers: list[Any]) -> list[str]:
    """Return traps for the columns of a converted row whose text is neither in its prompt nor in its answers.

    All answers must have the text. One is enough for a column that is not text, since it may copy a conversation.

    Args:
        row: A converted row.
        prompt: The prompt that is read, as text or messages; empty if none is.
        answers: The row's answers, as texts, messages, or lists of these.
    """
    roles, traps, texts = set(_roles_in([prompt, *answers])), list[str](), list[str]()
    # `conversations` is not needed after another question, and `unread_parts` finds unread tools of messages
    excluded = ("conversations",) * bool(roles - {"assistant"}) + ("tools",) * bool(roles)
    for key, value in row.items():
        if (_TEXT_COLUMN.fullmatch(key) and key not in excluded) or (key == "prompt" and not prompt):
            parts, enough = set(_strings(value)), all if isinstance(value, str) else any
            texts = texts or [_words(" ".join(_strings([prompt, answer]))) for answer in answers]
            if not all(enough(_words(part) in text for text in texts) for part in parts):
                traps.append(f"{'beside' if key == 'prompt' else 'column'} {key}")
    return traps


def unread_parts(messages: list[Any], variables: Row, rendered: str, render: Callable[..., str]) -> list[str]:
    """Return traps for the parts of a conversation that the chat template does not write.

    Args:
        messages: The conversation, with texts or lists of text parts as contents.
        variables: The template's variables, such as ``tools``.
        rendered: The rendered conversation.
        render: Function that renders messages; keyword arguments replace variables.
    """
    text, unread = _words(rendered), list[str]()

    def is_written(part: str) -> bool:
        return _words(part) in text or _words(json.dumps(part, ensure_ascii=False)[1:-1]) in text

    for message in messages:
        contents = texts_of(message)
        parts = re.split("</?think>", "".join(contents))
        parts_alone = [part for content in contents for part in re.split("</?think>", content)]  # not joined
        if not all(map(is_written, parts)) and not all(map(is_written, parts_alone)):
            has_answer = len(parts) > 1 and is_written(parts[-1])
            unread += ["thoughts (`<think>`)" if has_answer else f"text of the role {message['role']!r}"]
    for key in _OTHER_PARTS:
        without = [{name: value for name, value in message.items() if name != key} for message in messages]
        if without != messages or variables.get(key):
            with suppress(Exception):  # templates are programs and may raise anything
                unread += [f"`{key}`"] * (render(without, **{key: None}) == rendered)
    return [f"template {part}" for part in dict.fromkeys(unread)]


def _words(text: str) -> str:
    """Return the words and other characters of a text, each between spaces: a short word is not found in others."""
    return " ".join(["", *_WORD.findall(text), ""])


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a value, at any nesting depth, except roles. JSON text is parsed."""
    if isinstance(value, str) and value.strip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for item in [item for key, item in items if key not in ("role", "from")]:
            yield from _strings(item)


def warn_of_traps(dataset: Dataset, name: str) -> Dataset:
    """Log each trap with its number of rows, and return the dataset without the column `TRAPS`.

    Raises:
        UserError: The answers of more than half of the rows have the same tokens.
    """
    if TRAPS not in dataset.column_names:
        return dataset
    rows_of = defaultdict[str, list[int]](list)
    for index, traps in enumerate(dataset.with_format(None)[TRAPS]):
        for trap in traps.splitlines():
            rows_of[trap].append(index)
    same, unwritten = rows_of.get("same answers", []), [trap[9:] for trap in rows_of if trap.startswith("template ")]
    if len(same) > len(dataset) / 2:
        reason = f"the chat template does not write {', '.join(unwritten)}" if unwritten else "see the first"
        raise UserError(
            f"{name} dataset: in {len(same)} of {len(dataset)} rows (the first is row {same[0]}), chosen and rejected "
            f"have the same tokens, so hardly anything can be learned: {reason}. Correct the rows or the template."
        )
    for trap, rows in rows_of.items():
        _warn(trap, f"{name} dataset: in {len(rows)} of {len(dataset)} rows (the first is row {rows[0]})")
    return dataset.remove_columns(TRAPS)


def warn_of_new_traps(traps: list[str], warned: set[str], where: str) -> None:
    """Log the traps of a streamed row that are not in ``warned`` yet, and add them."""
    for trap in dict.fromkeys(traps):
        if trap not in warned:
            _warn(trap, f"{where}, and perhaps in later rows")
    warned.update(traps)


def _warn(trap: str, where: str) -> None:
    """Log a trap of the rows that ``where`` names."""
    key, name = trap.split(" ", 1)
    logger.warning(f"{where}, {_WARNINGS[key].format(name)}.")


def _roles_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and ("role" in value or "from" in value):
        yield str(value.get("role") or value.get("from"))
    for item in value if isinstance(value, list) else ():
        yield from _roles_in(item)
