"""Prepared datasets: their rows as arrays, length statistics, and prompts.

Rows with the same prompt are not independent, and share tokens.

A dataset counts as prepared if its rows are tokenized and it is not a stream. `trl_tpu.data.kinds` has the columns.

Letters in names of arrays: N rows, K answers per row, D sequences of all rows.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
from datasets import Dataset

from ..packing.shapes import RowLengths, common_prefix
from .formats import convert_row
from .kinds import COLUMNS, Pairs, RowKind, answers_of, kind_of, kind_of_columns
from .kinds.solutions import STEP_ENDS

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class LengthStats:
    """Statistics of a tokenized dataset. They serve to plan batches and to check the data of a resumed run.

    Args:
        lengths: For each row, the length of the answers' common prefix, and the length of each answer's tail after it.
        shared_prefix: Length of the common prefix of all sequences, such as a system prompt, in tokens.
        checksum: Checksum of all token ids and labels, in row order.
        answers: K, the maximum number of scored positions per row: answers, or labeled steps.
    """

    lengths: RowLengths
    shared_prefix: int
    checksum: int
    answers: int = 2


#: Statistics of the datasets that were measured.
STATS: WeakKeyDictionary[Dataset, LengthStats] = WeakKeyDictionary()


def is_prepared(dataset: Any) -> bool:
    """Check whether a dataset is tokenized and is not a stream."""
    return isinstance(dataset, Dataset) and kind_of_columns(dataset.column_names) is not None


def kind_of_dataset(dataset: Any) -> RowKind:
    """Return the kind of a prepared dataset's rows, with the default settings. A stream has pairs.

    The number of answers per row distinguishes kinds with the same columns.
    """
    kind = kind_of_columns(dataset.column_names) if isinstance(dataset, Dataset) else None
    if kind is None:
        return Pairs()
    return (len(dataset) and kind_of(dataset.with_format(None)[0])) or kind


def length_stats(dataset: Dataset) -> LengthStats:
    """Return the statistics of a tokenized dataset. They are computed once per dataset object, see `STATS`.

    Raises:
        ValueError: The dataset is not tokenized, or is a stream.
    """
    if dataset not in STATS:
        STATS[dataset] = length_stats_of(parts_of(dataset))
    return STATS[dataset]


def length_stats_of(parts: Iterable[list[dict[str, Any]]]) -> LengthStats:
    """Measure tokenized rows, given in lists as from `parts_of`."""
    lengths = [RowLengths.of([])]
    shared: list[bytes] = []  # empty, or one item: the common prefix of all sequences so far, 4 bytes per token
    answers = 1
    checksums: dict[str, int] = defaultdict(int)  # running checksum per kind of content: table sizes do not affect it
    for rows in filter(None, parts):
        kind = kind_of_columns(rows[0])
        assert kind is not None  # the rows are tokenized
        answers_N, labels_N = list(map(kind.answers, rows)), list(map(kind.labels, rows))
        lengths.append(RowLengths.of(map(_lengths, answers_N)))
        scored_N = [labels.get(STEP_ENDS, answers_K) for labels, answers_K in zip(labels_N, answers_N, strict=True)]
        answers = max(answers, *map(len, scored_N))
        sequences_D = list(chain.from_iterable(answers_N))
        byte_strings = [*shared, *map(_as_bytes, sequences_D)]
        shared = [byte_strings[0][: len(os.path.commonprefix(byte_strings))]]
        sizes = {"lengths": [*map(len, sequences_D)], "counts": [*map(len, answers_N)]}
        for name, content in {"answers": np.concatenate(sequences_D), **sizes}.items():
            checksums[name] = crc32(np.ascontiguousarray(content, dtype=np.int64).data, checksums[name])
        for name in labels_N[0]:
            text = "".join(f"{labels[name]}," for labels in labels_N)
            checksums[name] = crc32(text.encode(), checksums[name])
    checksum = crc32(repr(sorted(checksums.items())).encode())
    return LengthStats(RowLengths.joined(lengths), len(b"".join(shared)) // 4, checksum, answers)


def length_stats_of_stream(stream: Iterable[Mapping[str, Any]]) -> RowLengths:
    """Measure the first 1,000 rows of a tokenized stream. Training then reads the stream from its beginning."""
    rows = islice(stream, _ROWS_AT_ONCE)
    return RowLengths.of(_lengths(list(map(np.asarray, answers_of(row)))) for row in rows)


def _lengths(answers: list[np.ndarray]) -> tuple[int, ...]:
    """Return the lengths of the common prefix and of the tails of a row's answers."""
    prefix = min(common_prefix(answers[0], ids) for ids in answers)
    return prefix, *(len(ids) - prefix for ids in answers)


def parts_of(dataset: Dataset) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of up to 1,000 tokenized rows, with token ids and labels of tokens as arrays."""
    kind = kind_of_columns(dataset.column_names)
    if kind is None:
        raise ValueError(f"The dataset is not tokenized; its columns are {dataset.column_names}.")
    names = [*kind.columns, *(name for name in kind.optional_columns if name in dataset.column_names)]
    arrays = [name for name in names if name in (*kind.token_columns, "labels")]
    formatted = dataset.select_columns(names).with_format("numpy", columns=arrays, output_all_columns=True)
    for part in formatted.iter(_ROWS_AT_ONCE):
        yield [dict(zip(part, values, strict=True)) for values in zip(*part.values(), strict=True)]


def rows_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield tokenized rows in the form of `parts_of`."""
    return chain.from_iterable(parts_of(dataset))


def _as_bytes(ids: np.ndarray) -> bytes:
    return ids.astype(np.int32).tobytes()


# ---- prompts

#: A hash of the prompt, or the common prefix of a row's answers; empty if the row's prompt is unknown.
Prompt = int | bytes

_MAX_ANSWER_OVERLAP = 64  # bytes (16 tokens) of a row's common prefix that may follow the prompt

#: Raw rows of prepared datasets that do not keep their text.
RAW_BY_PREPARED: WeakKeyDictionary[Dataset, Dataset] = WeakKeyDictionary()


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
    for row, prefix in zip(rows_of(dataset), length_stats(dataset).lengths.prefix_N.tolist(), strict=True):
        yield _as_bytes(answers_of(row)[0][:prefix])


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
