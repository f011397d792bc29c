"""Reads prepared rows: their forms, lengths, labels and shared prompts."""

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
"""The label of tokens at which no step ends, as in torch's losses."""
# columns of tokenized rows: TRL's of pairs, with optional labels, and of solutions, and ours of rankings
PAIR = ("chosen_ids", "rejected_ids")
PAIR_LABELS = ("margin", "chosen_probability")
RANKING = ("answer_ids", "grades")
SOLUTION = ("input_ids", "labels")
OLD_KEYS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")
"""Columns of pairs, and keys of a batch, in TRL up to 0.23."""
COLUMNS = (*PAIR, *RANKING, *SOLUTION, *PAIR_LABELS)
"""All columns that training reads."""
TOKENS = (*PAIR, "answer_ids", "input_ids")
"""The columns of token ids among them."""
ANSWERS, STEP_ENDS = "answers", "step_ends"
_ROWS = 1000  # of a table


def row_format_of(columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that hold a row's tokens: `PAIR`, `RANKING` or `SOLUTION`; none if it is not tokenized."""
    return next((form for form in (PAIR, RANKING, SOLUTION) if set(form) <= set(columns)), ())


def answers_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the token ids of a prepared row's answers, of whatever form; of a solution there is one.

    A row that is no row of a dataset has them in `answers`, and labels by the names that `labels_of` gives them.
    """
    if (form := row_format_of(row)) == PAIR:
        return [row[column] for column in PAIR]
    return [row["input_ids"]] if form == SOLUTION else row["answer_ids" if form == RANKING else ANSWERS]


def labels_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of a prepared row, of whatever form.

    They are `margin` and `chosen_probability` of pairs, if they have them, `grades` of rankings, and of solutions
    `step_ends`, the indices of the tokens at which labeled steps end, and `grades` of these steps.
    """
    if (form := row_format_of(row)) != SOLUTION:
        own_names: dict[Any, tuple[str, ...]] = {PAIR: PAIR_LABELS, RANKING: ("grades",)}
        names = own_names.get(form, (*PAIR_LABELS, "grades", STEP_ENDS))
        return {name: row[name] for name in names if name in row}
    ends = np.flatnonzero(np.asarray(row["labels"]) != NO_LABEL).tolist()
    return {STEP_ENDS: ends, "grades": [float(row["labels"][end]) for end in ends]}


def read_table(table: pa.Table) -> list[dict[str, Any]]:
    """Return the tokenized rows of an arrow table, with token ids and labels as arrays of 4 bytes each."""
    columns = [
        _arrays(table[name]) if name in (*TOKENS, "labels") else table[name].to_pylist() for name in table.column_names
    ]
    return [dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _arrays(lists: pa.ChunkedArray) -> list[Any]:
    """Return lists of numbers as arrays, at any depth."""
    values = pc.list_flatten(lists)
    dtype = np.float32 if pa.types.is_floating(values.type) else np.int32
    values_T = _arrays(values) if pa.types.is_nested(values.type) else values.to_numpy().astype(dtype)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy()).tolist()
    return [values_T[start:end] for start, end in pairwise([0, *ends])]


@dataclass(frozen=True)
class LengthStats:
    """What batches and a resumed run must know of a prepared dataset; it holds no tokens.

    Args:
        lengths: The tokens that the answers of each row share at their beginning, and those after.
        shared_prefix: How many first tokens all sequences share, such as a system prompt.
        checksum: Of all token ids and labels, in the order of the rows.
        answers: K, the most scored positions of a row: answers, or labeled steps.
    """

    lengths: PairLengths
    shared_prefix: int
    checksum: int
    answers: int = 2


_MEASURED: WeakKeyDictionary[Dataset, LengthStats] = WeakKeyDictionary()


def is_prepared(dataset: Any) -> bool:
    """Tell whether a dataset has prepared rows, and all of them."""
    return isinstance(dataset, Dataset) and bool(row_format_of(dataset.column_names))


def has_row_format(dataset: Any, form: tuple[str, ...]) -> bool:
    """Tell whether a dataset is tokenized in this form."""
    return isinstance(dataset, Dataset) and row_format_of(dataset.column_names) == form


def length_stats(dataset: Dataset) -> LengthStats:
    """Measure a prepared dataset: once, and a few rows at a time.

    Raises:
        ValueError: It is not prepared.
    """
    if dataset not in _MEASURED:
        if not is_prepared(dataset):
            raise ValueError(f"The dataset is not tokenized; its columns are {dataset.column_names}.")
        _MEASURED[dataset] = length_stats_of_tables(tables_of(dataset))
    return _MEASURED[dataset]


def length_stats_of_stream(stream: Iterable[Mapping[str, Any]]) -> PairLengths:
    """Measure the first 1,000 pairs of a prepared stream, which training reads again from its beginning."""
    lengths = list[tuple[int, int, int]]()
    for chosen, rejected in (map(np.asarray, answers_of(row)) for row in islice(stream, _ROWS)):
        prefix = _common_prefix(chosen, rejected)
        lengths.append((prefix, len(chosen) - prefix, len(rejected) - prefix))
    return PairLengths.of(lengths)


def select(dataset: Dataset, is_kept_N: np.ndarray) -> Dataset:
    """Return the rows that are kept, measured in the tables of all rows: tables of a selection are slow to read."""
    kept = dataset.select(np.flatnonzero(is_kept_N))
    masks = (pa.array(is_kept_N[first : first + _ROWS]) for first in range(0, len(dataset), _ROWS))
    _MEASURED[kept] = length_stats_of_tables(map(pa.Table.filter, tables_of(dataset), masks))
    return kept


def length_stats_of_tables(tables: Iterable[pa.Table]) -> LengthStats:
    """Measure prepared rows in arrow tables, one after another."""
    parts: list[PairLengths] = []
    shared: list[bytes] = []  # the first tokens of all sequences so far
    answers = 1
    checksums: dict[str, int] = defaultdict(int)  # one each, so that it does not matter where a table ends
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
    """Read the token ids and the labels of tokenized rows as arrow tables of many rows."""
    form = row_format_of(dataset.column_names)
    labels = [name for name in PAIR_LABELS if name in dataset.column_names and form == PAIR]
    return dataset.with_format("arrow", columns=[*form, *labels]).iter(batch_size=_ROWS)


def rows_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Read the token ids, as `read_table` does, and the labels of tokenized rows, without their other columns."""
    return chain.from_iterable(map(read_table, tables_of(dataset)))


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    return length if same.all() else int(same.argmin())


def _lengths(sequences_D: list[np.ndarray], counts_N: np.ndarray) -> PairLengths:
    """Return each row's common prefix and the tails after it, of sequences that lie row after row."""
    firsts_N = np.cumsum(counts_N) - counts_N
    first_D, row_D = np.repeat(firsts_N, counts_N), np.repeat(np.arange(len(counts_N)), counts_N)
    pairs = zip(first_D.tolist(), sequences_D, strict=True)
    shared_D = [_common_prefix(sequences_D[first], ids) for first, ids in pairs]
    prefix_N = np.minimum.reduceat(shared_D, firsts_N)
    tails_NK = np.zeros((len(counts_N), max(2, counts_N.max())), np.int64)
    tails_NK[row_D, np.arange(len(row_D)) - first_D] = [*map(len, sequences_D)] - prefix_N[row_D]
    return PairLengths(prefix_N, tails_NK)
