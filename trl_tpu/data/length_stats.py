"""Readers of prepared rows: their forms, lengths, labels and shared prompts."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ..packing.shapes import PairLengths

NO_LABEL = -100
"""Label of tokens that do not end a labeled step; the same value as `ignore_index` in torch's losses."""
# columns of tokenized rows: TRL's for pairs (with optional labels) and solutions, and our own for rankings
PAIR = ("chosen_ids", "rejected_ids")
PAIR_LABELS = ("margin", "chosen_probability")
RANKING = ("answer_ids", "grades")
SOLUTION = ("input_ids", "labels")
OLD_KEYS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")
"""Columns of pairs, and keys of a batch, in TRL up to 0.23."""
COLUMNS = (*PAIR, *RANKING, *SOLUTION, *PAIR_LABELS)
"""All columns that training reads."""
TOKENS = (*PAIR, "answer_ids", "input_ids")
"""The columns of token ids in `COLUMNS`."""
ANSWERS, STEP_ENDS = "answers", "step_ends"
_TABLE_ROWS = 1000  # rows per arrow table


def row_format_of(columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that hold a row's tokens: `PAIR`, `RANKING` or `SOLUTION`; none if the row has no tokens."""
    return next((form for form in (PAIR, RANKING, SOLUTION) if set(form) <= set(columns)), ())


def answers_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the token ids of the answers of a prepared row of any form; a solution has one answer.

    A row that does not come from a dataset has its answers in `answers`, and its labels under the names that
    `labels_of` returns.
    """
    if (form := row_format_of(row)) == PAIR:
        return [row[column] for column in PAIR]
    return [row["input_ids"]] if form == SOLUTION else row["answer_ids" if form == RANKING else ANSWERS]


def labels_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of a prepared row of any form.

    Pairs may have `margin` and `chosen_probability`. Rankings have `grades`. Solutions have `step_ends`, the indices
    of the tokens at which labeled steps end, and `grades`, the labels of these steps.
    """
    if (form := row_format_of(row)) != SOLUTION:
        names_by_form: dict[Any, tuple[str, ...]] = {PAIR: PAIR_LABELS, RANKING: ("grades",)}
        names = names_by_form.get(form, (*PAIR_LABELS, "grades", STEP_ENDS))
        return {name: row[name] for name in names if name in row}
    ends = np.flatnonzero(np.asarray(row["labels"]) != NO_LABEL).tolist()
    return {STEP_ENDS: ends, "grades": [float(row["labels"][end]) for end in ends]}


def read_table(table: pa.Table) -> list[dict[str, Any]]:
    """Return the tokenized rows of an arrow table, with token ids and labels as arrays of 4-byte numbers."""
    columns = [
        _arrays(table[name]) if name in (*TOKENS, "labels") else table[name].to_pylist() for name in table.column_names
    ]
    return [dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _arrays(lists: pa.ChunkedArray) -> list[Any]:
    """Convert lists of numbers to arrays, at any nesting depth."""
    values = pc.list_flatten(lists)
    dtype = np.float32 if pa.types.is_floating(values.type) else np.int32
    values_T = _arrays(values) if pa.types.is_nested(values.type) else values.to_numpy().astype(dtype)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy()).tolist()
    return [values_T[start:end] for start, end in pairwise([0, *ends])]


@dataclass(frozen=True)
class LengthStats:
    """Statistics of a prepared dataset for planning batches and for resuming a run; holds no tokens.

    Args:
        lengths: For each row, the length of the answers' common prefix, and the length of each answer after it.
        shared_prefix: Length of the common prefix of all sequences, such as a system prompt, in tokens.
        checksum: Checksum of all token ids and labels, in row order.
        answers: K, the maximum number of scored positions per row: answers, or labeled steps.
    """

    lengths: PairLengths
    shared_prefix: int
    checksum: int
    answers: int = 2


_STATS_BY_DATASET: WeakKeyDictionary[Dataset, LengthStats] = WeakKeyDictionary()


def is_prepared(dataset: Any) -> bool:
    """Check whether a dataset is tokenized and is not a stream."""
    return isinstance(dataset, Dataset) and bool(row_format_of(dataset.column_names))


def has_row_format(dataset: Any, form: tuple[str, ...]) -> bool:
    """Check whether a dataset is tokenized in this form and is not a stream."""
    return isinstance(dataset, Dataset) and row_format_of(dataset.column_names) == form


def length_stats(dataset: Dataset) -> LengthStats:
    """Measure a prepared dataset in chunks of rows; repeated calls return the first result.

    Raises:
        ValueError: The dataset is not prepared.
    """
    if dataset not in _STATS_BY_DATASET:
        if not is_prepared(dataset):
            raise ValueError(f"The dataset is not tokenized; its columns are {dataset.column_names}.")
        _STATS_BY_DATASET[dataset] = length_stats_of_tables(tables_of(dataset))
    return _STATS_BY_DATASET[dataset]


def length_stats_of_stream(stream: Iterable[Mapping[str, Any]]) -> PairLengths:
    """Measure the first 1,000 pairs of a prepared stream; training reads the stream again from its beginning."""
    lengths = list[tuple[int, int, int]]()
    for chosen, rejected in (map(np.asarray, answers_of(row)) for row in islice(stream, _TABLE_ROWS)):
        prefix = _common_prefix(chosen, rejected)
        lengths.append((prefix, len(chosen) - prefix, len(rejected) - prefix))
    return PairLengths.of(lengths)


def select(dataset: Dataset, is_kept_N: np.ndarray) -> Dataset:
    """Select and measure rows; they are measured in the tables of all rows, since a selection's tables read slowly."""
    selection = dataset.select(np.flatnonzero(is_kept_N))
    masks = (pa.array(is_kept_N[first : first + _TABLE_ROWS]) for first in range(0, len(dataset), _TABLE_ROWS))
    _STATS_BY_DATASET[selection] = length_stats_of_tables(map(pa.Table.filter, tables_of(dataset), masks))
    return selection


def length_stats_of_tables(tables: Iterable[pa.Table]) -> LengthStats:
    """Measure prepared rows in arrow tables, one table at a time."""
    parts: list[PairLengths] = []
    shared: list[bytes] = []  # the common prefix of all sequences so far
    answers = 1
    checksums: dict[str, int] = defaultdict(int)  # one per kind of content, so that table boundaries do not matter
    for rows in filter(None, map(read_table, tables)):
        answers_N, labels_N = list(map(answers_of, rows)), list(map(labels_of, rows))
        sequences_D, counts_N = list(chain.from_iterable(answers_N)), np.array(list(map(len, answers_N)))
        parts.append(_lengths(sequences_D, counts_N))
        ends_N = [labels.get(STEP_ENDS, answers_K) for labels, answers_K in zip(labels_N, answers_N, strict=True)]
        answers = max(answers, *map(len, ends_N))
        beginnings = [*shared, *(ids.tobytes() for ids in sequences_D)]
        shared = [beginnings[0][: len(os.path.commonprefix(beginnings))]]
        contents = {ANSWERS: np.concatenate(sequences_D), "lengths": [*map(len, sequences_D)], "counts": counts_N}
        for name, content in contents.items():
            checksums[name] = crc32(np.ascontiguousarray(content, dtype=np.int64).data, checksums[name])
        for label in labels_N[0]:
            text = "".join(f"{labels[label]}," for labels in labels_N)
            checksums[label] = crc32(text.encode(), checksums[label])
    checksum = crc32(repr(sorted(checksums.items())).encode())
    return LengthStats(PairLengths.joined(parts), len(b"".join(shared)) // 4, checksum, answers)


def tables_of(dataset: Dataset) -> Iterator[pa.Table]:
    """Yield the token ids and labels of tokenized rows in arrow tables of up to 1,000 rows."""
    form = row_format_of(dataset.column_names)
    labels = [name for name in PAIR_LABELS if name in dataset.column_names and form == PAIR]
    return dataset.with_format("arrow", columns=[*form, *labels]).iter(batch_size=_TABLE_ROWS)


def rows_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield tokenized rows as `read_table` returns them, without columns other than token ids and labels."""
    return chain.from_iterable(map(read_table, tables_of(dataset)))


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    same = first[:length] == second[:length]
    return length if same.all() else int(same.argmin())


def _lengths(sequences_D: list[np.ndarray], counts_N: np.ndarray) -> PairLengths:
    """Return each row's common prefix length and the lengths after it, for sequences in row order."""
    firsts_N = np.cumsum(counts_N) - counts_N
    first_D, row_D = np.repeat(firsts_N, counts_N), np.repeat(np.arange(len(counts_N)), counts_N)
    pairs = zip(first_D.tolist(), sequences_D, strict=True)
    shared_D = [_common_prefix(sequences_D[first], ids) for first, ids in pairs]
    prefix_N = np.minimum.reduceat(shared_D, firsts_N)
    tails_NK = np.zeros((len(counts_N), max(2, counts_N.max())), np.int64)
    tails_NK[row_D, np.arange(len(row_D)) - first_D] = [*map(len, sequences_D)] - prefix_N[row_D]
    return PairLengths(prefix_N, tails_NK)
