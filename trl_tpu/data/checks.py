"""What preference data must be, checked before anything trains. Every error names the rule, the row and the fix."""

import difflib
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

RAW_COLUMNS = ("chosen", "rejected")
TOKEN_COLUMNS = ("chosen_ids", "rejected_ids")
ID_COLUMNS = (*TOKEN_COLUMNS, "input_ids_chosen", "input_ids_rejected")  # today's and TRL's up to 0.23
_LARGEST = float(np.finfo(np.float32).max)  # losses are float32
_OPTIONAL_COLUMNS = ("prompt", "margin", "tools", "chat_template_kwargs")
_ACCEPTED = (
    "Preference data has the columns `chosen` and `rejected` (text, or lists of messages), optionally with `prompt`, "
    "`margin`, `tools` and `chat_template_kwargs`; or, already tokenized, `chosen_ids` and `rejected_ids`, optionally "
    "with `margin`."
)


def column_names(dataset: Dataset | IterableDataset, name: str) -> list[str]:
    """The dataset's columns; of a stream that does not know them, those of its first row.

    Raises:
        TypeError: not a dataset.
        ValueError: no rows.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(
            f"The {name} dataset must be a `datasets.Dataset` or `datasets.IterableDataset`, got "
            f"`{type(dataset).__name__}`. Make one of a list of rows with `datasets.Dataset.from_list(rows)`."
        )
    empty = ValueError(f"The {name} dataset is empty: it needs at least one pair. Check its split, file and filters.")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise empty
    if dataset.column_names is not None:
        return list(dataset.column_names)
    first = next(iter(dataset), None)
    if first is None:
        raise empty
    return list(first)


def check_columns(columns: list[str], name: str) -> None:
    """Raise ValueError where a needed column is missing; warn where an optional one looks misspelt."""
    needed = TOKEN_COLUMNS if set(TOKEN_COLUMNS) & set(columns) else RAW_COLUMNS
    missing = [column for column in needed if column not in columns]
    others = [column for column in columns if column not in needed]
    if missing:
        guesses = [(near[0], want) for want in missing if (near := difflib.get_close_matches(want, others, n=1))]
        fixes = [f" If `{near}` is meant: `dataset.rename_column({near!r}, {want!r})`." for near, want in guesses]
        raise ValueError(
            f"The {name} dataset lacks {' and '.join(f'`{column}`' for column in missing)}; its columns are "
            f"{sorted(columns)}. {_ACCEPTED}{''.join(fixes)}"
        )
    for want in _OPTIONAL_COLUMNS:
        near = difflib.get_close_matches(want, others, n=1, cutoff=0.85) if want not in columns else []
        if near:
            logger.warning(
                "The %s dataset's column `%s` is not used; if `%s` is meant, rename it.", name, near[0], want
            )


def check_raw_row(row: Mapping[str, Any], index: int, name: str) -> None:
    """Check one row's texts or messages.

    An answer may be empty where a prompt makes the dialogue non-empty (a model may have said nothing).

    Raises:
        ValueError: a null value, an empty dialogue, a message without a role or without anything said, a form that
            mixes text and messages, answers that end with different roles.
        TypeError: neither text nor a list of messages, or a message's role or content of another type.
    """
    where = f"Row {index} of the {name} dataset"
    parts = {key: row[key] for key in ("prompt", *RAW_COLUMNS) if key in row}
    for key, value in parts.items():
        if value is None:
            raise ValueError(f"{where} has no `{key}` (null); every pair needs one. Remove such rows or fill them.")
        if isinstance(value, list):
            _check_messages(value, f"{where}: `{key}`")
        elif not isinstance(value, str):
            raise TypeError(
                f"{where}: `{key}` must be text or a list of messages, got {type(value).__name__}. Where the "
                "dataset's format makes the values so, take it off: `dataset.with_format(None)`."
            )
    if len({type(value) for value in parts.values()}) > 1:
        forms = [f"`{key}` is {'text' if isinstance(value, str) else 'messages'}" for key, value in parts.items()]
        raise ValueError(
            f"{where} mixes forms: {', '.join(forms)}. All must be text or all lists of messages. If the dialogues "
            "already hold the prompt, drop it: `dataset.remove_columns('prompt')`."
        )
    for key in RAW_COLUMNS:
        if not parts.get("prompt") and not parts[key]:
            raise ValueError(
                f"{where}: `{key}` is empty; a dialogue needs at least one character or message. Remove such rows."
            )
    _check_last_roles(parts, where)
    kwargs = row.get("chat_template_kwargs")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(
            f"{where}: `chat_template_kwargs` must be a mapping of names to values, got {kwargs!r:.80} "
            f"({type(kwargs).__name__}). Write an object, or null."
        )


def _check_messages(messages: list[Any], where: str) -> None:
    form = "Messages are {'role': ..., 'content': ...}, both text"
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(
                f"{where} is a list of {type(message).__name__}; a list must hold messages, "
                "{'role': ..., 'content': ...}."
            )
        if message.get("role") is None:
            raise ValueError(
                f"{where} holds a message without a `role`; its keys are {sorted(message)}. Messages are "
                "{'role': ..., 'content': ...}; `maybe_convert_to_chatml` converts `from`/`value`."
            )
        role, content = message["role"], message.get("content")
        if not isinstance(role, str) or not role:
            raise TypeError(f"{where} holds a message whose `role` is {role!r} ({type(role).__name__}). {form}.")
        said = [key for key, value in message.items() if key != "role" and value is not None]
        if not said:  # one that calls tools needs no content
            raise ValueError(
                f"{where} holds a message of the role {role!r} without a `content`, which a template would render as "
                f"None. {form}; write '' where nothing was said, or remove such rows."
            )
        if isinstance(content, int | float):
            raise TypeError(
                f"{where} holds a message whose `content` is {content!r} ({type(content).__name__}). {form}."
            )
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in (None, "text"):
                raise ValueError(
                    f"{where} holds a message with content of the type {part['type']!r}; a reward model here reads "
                    "text only. Remove such rows, or such parts of their messages."
                )


def _check_last_roles(parts: Mapping[str, Any], where: str) -> None:
    """The two answers must end with the same role: one that ends with a question is no answer to compare."""
    roles = [parts[key][-1]["role"] for key in RAW_COLUMNS if isinstance(parts[key], list) and parts[key]]
    if len(set(roles)) > 1:
        raise ValueError(
            f"{where}: `chosen` ends with a message of the role {roles[0]!r}, but `rejected` with one of the role "
            f"{roles[1]!r}; both must be answers of the same role, since their last tokens are compared. Correct the "
            "roles, or remove such rows."
        )


def read_tools(tools: Any, where: str) -> list[Any] | None:
    """A row's tools, a list or JSON text of one, as a list.

    Raises:
        ValueError: text that is no JSON.
        TypeError: neither a list of mappings nor JSON text of one.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: `tools` is text but not JSON ({error}). Write the list as JSON.") from error
    if tools is None or (
        isinstance(tools, list) and all(isinstance(tool, Mapping) or callable(tool) for tool in tools)
    ):
        return tools
    raise TypeError(
        f"{where}: `tools` must be a list of JSON schemas, or JSON text of one, got {tools!r:.80}. A single tool is a "
        "list of one; without tools leave it null."
    )


def check_token_row(row: Mapping[str, Any], index: int, name: str) -> None:
    """Check one row's token ids: TypeError where they are no lists of integers, ValueError where null or empty."""
    for key in TOKEN_COLUMNS:
        ids = row[key]
        if ids is None or len(ids) == 0:
            raise _no_tokens(key, index, name)
        if isinstance(ids, str) or not np.issubdtype(np.asarray(ids).dtype, np.integer):
            raise _not_tokens(key, name, f"{type(ids).__name__} in row {index}")


def token_lengths(column: pa.ChunkedArray, key: str, first: int, name: str) -> np.ndarray:
    """Lengths [N] of a column of token ids whose first row is row ``first``; errors as in `check_token_row`."""
    is_list = isinstance(column.type, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
    if not is_list and not pa.types.is_null(column.type):
        raise _not_tokens(key, name, str(column.type))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy() if is_list else np.zeros(len(column), np.int64)
    if (lengths == 0).any():
        raise _no_tokens(key, first + int((lengths == 0).argmax()), name)
    if not pa.types.is_integer(column.type.value_type):
        raise _not_tokens(key, name, str(column.type))
    return lengths


def check_token_ids(dataset: Any, num_embeddings: int, name: str) -> Any:
    """Check that the model has an embedding for every token id: XLA would read the table's last row, silently.

    Args:
        dataset: any; one without columns of token ids passes. A stream is checked as it is read.
        num_embeddings: rows of the model's embedding table.
        name: what errors call the dataset.

    Returns:
        The dataset; of a stream, one that checks.

    Raises:
        ValueError: an id that is negative or too large; names its row, the id, and the table's size.
    """
    if isinstance(dataset, IterableDataset):
        settings = {"num_embeddings": num_embeddings, "name": name}
        return dataset.map(_check_row_of_ids, with_indices=True, fn_kwargs=settings, features=dataset.features)
    if not isinstance(dataset, Dataset):
        return dataset
    for key in (column for column in ID_COLUMNS if column in dataset.column_names):
        first = 0
        for table in dataset.select_columns([key]).with_format("arrow").iter(batch_size=10_000):
            column = table[key]
            if pa.types.is_nested(column.type) and pa.types.is_integer(column.type.value_type):
                extremes = pc.min_max(pc.list_flatten(column)).as_py()
                if extremes["min"] is not None and not 0 <= extremes["min"] <= extremes["max"] < num_embeddings:
                    for offset, ids in enumerate(column.to_pylist()):
                        _check_row_of_ids({key: ids}, first + offset, num_embeddings, name)
            first += len(column)
    return dataset


def _check_row_of_ids(row: Mapping[str, Any], index: int, num_embeddings: int, name: str) -> dict[str, Any]:
    for key in (column for column in ID_COLUMNS if column in row):
        ids = np.asarray(row[key])
        outside = (ids < 0) | (ids >= num_embeddings) if np.issubdtype(ids.dtype, np.integer) else np.zeros(0, bool)
        if outside.any():
            raise ValueError(
                f"Row {index} of the {name} dataset: `{key}` holds the token id {ids[outside][0]}, but the model's "
                f"embedding table has {num_embeddings} rows (ids 0 to {num_embeddings - 1}). Tokenize with the "
                "model's own tokenizer, or after adding tokens call `model.resize_token_embeddings(len(tokenizer))`."
            )
    return {}


def _no_tokens(key: str, index: int, name: str) -> ValueError:
    return ValueError(
        f"Row {index} of the {name} dataset: `{key}` holds no tokens; a dialogue needs at least one, since its reward "
        "is read at its last token. Remove such rows."
    )


def _not_tokens(key: str, name: str, got: str) -> TypeError:
    return TypeError(f"`{key}` of the {name} dataset must hold lists of integer token ids, got {got}.")


def check_margin(value: Any, index: int, name: str, *, nested: bool = False) -> None:
    """Check one target margin: a finite number, or with ``nested`` also a list of one, as old datasets have it.

    Raises:
        ValueError: missing, NaN or infinite.
        TypeError: not a number.
    """
    where = f"Row {index} of the {name} dataset"
    fix = "Every `margin` must be a finite number, since it is subtracted from the pair's reward margin in the loss"
    if nested and isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool):
        raise TypeError(f"{where}: `margin` is {value} (bool). {fix}.")
    if value is None:
        raise ValueError(f"{where} has no `margin` (null). {fix}: fill it with 0, or drop the row or the column.")
    try:
        number = float("text" if isinstance(value, str) else value)
    except (TypeError, ValueError):
        hint = " One text among the numbers of a file makes all of them text." if isinstance(value, str) else ""
        raise TypeError(f"{where}: `margin` is {value!r} ({type(value).__name__}). {fix}.{hint}") from None
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{where}: `margin` is {number}. {fix}: fill it with 0, or drop the row or the column.")


def check_margins(dataset: Dataset, name: str, *, nested: bool = False) -> None:
    """`check_margin` for every row of a dataset that has the column ``margin``; nothing for one that has not."""
    if "margin" not in dataset.column_names:
        return
    rows = dataset.select_columns(["margin"]).with_format("arrow")
    first = 0
    for table in rows.iter(batch_size=10_000):
        column = table["margin"]
        number = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
        if not (number and column.null_count == 0 and pc.all(pc.less_equal(pc.abs(column), _LARGEST)).as_py()):
            for offset, value in enumerate(column.to_pylist()):
                check_margin(value, first + offset, name, nested=nested)
        first += len(column)
