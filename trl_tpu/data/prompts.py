"""Prompts of rows: pairs with the same prompt are not independent, and share tokens."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from datasets import Dataset

from .formats import convert_row
from .kinds import COLUMNS, answers_of
from .length_stats import is_prepared, length_stats, rows_of

#: A hash of the prompt, or the common prefix of a row's answers; empty if the row's prompt is unknown.
Prompt = int | bytes

_MAX_ANSWER_OVERLAP = 64  # bytes (16 tokens) of a row's common prefix that may follow the prompt


RAW_BY_PREPARED: WeakKeyDictionary[Dataset, Dataset] = WeakKeyDictionary()
"""Raw rows of prepared datasets that do not keep their text."""


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """Return a group number for each row of token ids, [N]: see `group_prompts`."""
    return group_prompts(shared_prefixes(dataset))


def group_prompts(prompts: Iterable[Prompt]) -> np.ndarray:
    """Return a group number for each row, [N]; rows with the same prompt have the same number.

    If only the common prefix of a row's answers is known, it is the prompt, plus a few tokens if the answers begin
    alike. So a common prefix that extends another row's prompt by at most 64 bytes (16 tokens) has the same prompt.
    Any other common prefix is a new prompt. A prefix that all rows share, such as a system prompt, does not count. A
    row without a prompt has a group of its own.
    """
    interned: dict[Prompt, Prompt] = {}
    prompt_N = [interned.setdefault(prompt, prompt) for prompt in prompts]
    prefixes = sorted(prompt for prompt in interned if isinstance(prompt, bytes))
    skip = len(os.path.commonprefix(prefixes))
    prompt_by_prefix: dict[bytes, bytes] = {}
    nested_prompts = [b""]  # the prompts that begin the current prefix; prefixes come in lexicographic order
    for prefix in (prefix[skip:] for prefix in prefixes):
        while not prefix.startswith(nested_prompts[-1]):
            nested_prompts.pop()
        if not nested_prompts[-1] or len(prefix) - len(nested_prompts[-1]) > _MAX_ANSWER_OVERLAP:
            nested_prompts.append(prefix)
        prompt_by_prefix[prefix] = nested_prompts[-1]
    numbers: dict[Prompt | tuple[int], int] = {}
    keys = (
        prompt if isinstance(prompt, int) else prompt_by_prefix[prompt[skip:]] or (row,)
        for row, prompt in enumerate(prompt_N)
    )
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def shared_prefixes(dataset: Dataset) -> Iterator[bytes]:
    """Yield the common prefix of each row's tokenized answers, 4 bytes per token."""
    for row, prefix in zip(rows_of(dataset), length_stats(dataset).lengths.prefix_P.tolist(), strict=True):
        yield answers_of(row)[0][:prefix].tobytes()


def prompts_of(dataset: Dataset) -> Iterator[Prompt]:
    """Yield the prompt of each row of a prepared dataset, see `prompt_of`; from tokens if rows have no text."""
    raw = RAW_BY_PREPARED.get(dataset, dataset).with_format(None)
    raw = raw.select_columns([name for name in raw.column_names if name not in COLUMNS])
    has_text = raw.column_names and prompt_of(raw[0]) is not None
    has_tokens = is_prepared(dataset) and not has_text
    return shared_prefixes(dataset) if has_tokens else (prompt_of(row) or b"" for row in raw)


def prompt_of(row: Mapping[str, Any]) -> Prompt | None:
    """Return the prompt of a raw or scored row; None if the row has neither a prompt nor answers in text.

    The prompt is the column `prompt`; or all messages that come before the last one and that the row's conversations
    share; or the common prefix of the row's texts.
    """
    row = convert_row(row)[0]
    prompt = row.get("prompt") or ""
    answers = [each for name in ("chosen", "rejected", "completions") for each in _dialogues(row.get(name))]
    if not answers and not prompt:
        return None
    if answers and all(isinstance(messages, list) for messages in (prompt or [], *answers)):
        wholes = [[json.dumps(turn, default=str) for turn in (*prompt, *answer)] for answer in answers]
        prompt = os.path.commonprefix(wholes)[: min(map(len, wholes)) - 1]
    elif not prompt:
        shared = os.path.commonprefix([text for text in answers if isinstance(text, str)])
        while len(answers) > 1 and shared[-1:].isalnum():  # the answers' first words may begin alike
            shared = shared[:-1]
        return shared.encode(errors="replace")
    return hash(json.dumps(prompt, default=str)) if prompt else b""


def _dialogues(value: Any) -> list[Any]:
    """Return the texts and conversations in an answer or in a list of answers."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return [value]
    return [each for item in value for each in _dialogues(item)] if isinstance(value, list) else []
