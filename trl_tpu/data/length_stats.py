"""Prepared datasets: their rows as arrays, and length statistics.

A dataset counts as prepared if its rows are tokenized and it is not a stream. `trl_tpu.data.kinds` has the columns.

Letters in names of arrays: N rows, K answers per row, D sequences of all rows, T tokens.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
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
from .kinds import ANSWERS, TOKENS, Pairs, RowKind, answers_of, kind_of, kind_of_columns, labels_of
from .kinds.solutions import STEP_ENDS

_TABLE_ROWS = 1000  # rows per arrow table


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
    """Statistics of a tokenized dataset. They serve to plan batches and to check the data of a resumed run.

    Args:
        lengths: For each row, the length of the answers' common prefix, and the length of each answer's tail after it.
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
    return isinstance(dataset, Dataset) and kind_of_columns(dataset.column_names) is not None


def kind_of_dataset(dataset: Any) -> RowKind:
    """Return the kind of a prepared dataset's rows, with the default settings. A stream has pairs.

    The number of answers per row distinguishes kinds with the same columns.
    """
    if not is_prepared(dataset):
        return Pairs()
    kind = kind_of_columns(dataset.column_names)
    assert kind is not None  # known of prepared datasets
    return (len(dataset) and kind_of(dataset.with_format(None)[0])) or kind


def length_stats(dataset: Dataset) -> LengthStats:
    """Measure a tokenized dataset, one table of rows at a time. The result is cached per dataset object.

    Raises:
        ValueError: The dataset is not tokenized, or is a stream.
    """
    if dataset not in _STATS_BY_DATASET:
        if not is_prepared(dataset):
            raise ValueError(f"The dataset is not tokenized; its columns are {dataset.column_names}.")
        _STATS_BY_DATASET[dataset] = length_stats_of_tables(tables_of(dataset))
    return _STATS_BY_DATASET[dataset]


def length_stats_of_stream(stream: Iterable[Mapping[str, Any]]) -> PairLengths:
    """Measure the first 1,000 pairs of a tokenized stream. Training then reads the stream from its beginning."""
    lengths = list[tuple[int, int, int]]()
    for chosen, rejected in (map(np.asarray, answers_of(row)) for row in islice(stream, _TABLE_ROWS)):
        prefix = _common_prefix(chosen, rejected)
        lengths.append((prefix, len(chosen) - prefix, len(rejected) - prefix))
    return PairLengths.of(lengths)


def select(dataset: Dataset, is_kept_N: np.ndarray) -> Dataset:
    """Return the rows that a mask keeps, with their statistics already cached.

    The statistics are computed from tables of the whole dataset, because tables of a selection are slow to read.
    """
    selection = dataset.select(np.flatnonzero(is_kept_N))
    masks = (pa.array(is_kept_N[first : first + _TABLE_ROWS]) for first in range(0, len(dataset), _TABLE_ROWS))
    _STATS_BY_DATASET[selection] = length_stats_of_tables(map(pa.Table.filter, tables_of(dataset), masks))
    return selection


def length_stats_of_tables(tables: Iterable[pa.Table]) -> LengthStats:
    """Measure tokenized rows in arrow tables, one table at a time."""
    parts: list[PairLengths] = []
    shared: list[bytes] = []  # empty, or one item: the common prefix of all sequences so far, 4 bytes per token
    answers = 1
    checksums: dict[str, int] = defaultdict(int)  # running checksum per kind of content: table sizes do not affect it
    for rows in filter(None, map(read_table, tables)):
        answers_N, labels_N = list(map(answers_of, rows)), list(map(labels_of, rows))
        sequences_D, counts_N = list(chain.from_iterable(answers_N)), np.array(list(map(len, answers_N)))
        parts.append(_lengths(sequences_D, counts_N))
        scored_N = [labels.get(STEP_ENDS, answers_K) for labels, answers_K in zip(labels_N, answers_N, strict=True)]
        answers = max(answers, *map(len, scored_N))
        byte_strings = [*shared, *(ids.tobytes() for ids in sequences_D)]
        shared = [byte_strings[0][: len(os.path.commonprefix(byte_strings))]]
        contents = {ANSWERS: np.concatenate(sequences_D), "lengths": [*map(len, sequences_D)], "counts": counts_N}
        for name, content in contents.items():
            checksums[name] = crc32(np.ascontiguousarray(content, dtype=np.int64).data, checksums[name])
        for name in labels_N[0]:
            text = "".join(f"{labels[name]}," for labels in labels_N)
            checksums[name] = crc32(text.encode(), checksums[name])
    checksum = crc32(repr(sorted(checksums.items())).encode())
    return LengthStats(PairLengths.joined(parts), len(b"".join(shared)) // 4, checksum, answers)


def tables_of(dataset: Dataset) -> Iterator[pa.Table]:
    """Yield the token ids and labels of tokenized rows in arrow tables of up to 1,000 rows."""
    kind = kind_of_columns(dataset.column_names)
    assert kind is not None  # the rows are tokenized
    labels = [name for name in kind.optional_columns if name in dataset.column_names]
    return dataset.with_format("arrow", columns=[*kind.columns, *labels]).iter(batch_size=_TABLE_ROWS)


def rows_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield the token ids and labels of tokenized rows, as `read_table` returns them."""
    return chain.from_iterable(map(read_table, tables_of(dataset)))


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    same = first[:length] == second[:length]
    return length if same.all() else int(same.argmin())  # argmin returns the first mismatch


def _lengths(sequences_D: list[np.ndarray], counts_N: np.ndarray) -> PairLengths:
    """Return each row's lengths, from all sequences in row order and the number of sequences per row."""
    start_N = np.cumsum(counts_N) - counts_N
    start_D, row_D = np.repeat(start_N, counts_N), np.repeat(np.arange(len(counts_N)), counts_N)
    starts_and_ids = zip(start_D.tolist(), sequences_D, strict=True)
    shared_D = [_common_prefix(sequences_D[start], ids) for start, ids in starts_and_ids]
    prefix_N = np.minimum.reduceat(shared_D, start_N)
    tails_NK = np.zeros((len(counts_N), max(2, counts_N.max())), np.int64)
    tails_NK[row_D, np.arange(len(row_D)) - start_D] = [*map(len, sequences_D)] - prefix_N[row_D]
    return PairLengths(prefix_N, tails_NK)
