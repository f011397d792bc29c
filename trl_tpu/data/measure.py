"""Measures what batches must know of a whole dataset before training starts, once, from its arrow columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ..packing.lengths import PairLengths

_ANSWERS = ("answer_ids",)
SOLUTION = ("input_ids",)
"""A solution's token ids, beside which `labels` has one for each: of a step at its end, `NO_LABEL` elsewhere."""
NO_LABEL = -100
_COLUMNS = ("chosen_ids", "rejected_ids"), ("input_ids_chosen", "input_ids_rejected"), _ANSWERS, SOLUTION
_LABELS: dict[tuple[str, ...], tuple[str, ...]] = {_ANSWERS: ("grades",), SOLUTION: ("labels",)}
_LABELS_OF_PAIRS = ("margin", "chosen_probability")


@dataclass(frozen=True)
class Measured:
    """What batches and a resumed run must know of a dataset's token pairs; it holds no tokens.

    Args:
        lengths: The tokens that the dialogues of each pair share at their beginning, and those after.
        shared_prefix: How many first tokens all dialogues share, such as a system prompt.
        checksum: Of all token ids and margins, in the order of the pairs.
    """

    lengths: PairLengths
    shared_prefix: int
    checksum: int

    @property
    def sizes_N(self) -> np.ndarray:
        """Tokens that each pair takes in a row: both dialogues, with their common prefix counted once."""
        return self.lengths.sizes_P

    @property
    def longest_N(self) -> np.ndarray:
        """Tokens of the longest dialogue of each pair."""
        return self.lengths.longest_P

    @property
    def answers(self) -> int:
        """K, the most dialogues of a row: 2 of pairs."""
        return self.lengths.tails_PK.shape[1]


_MEASURED: WeakKeyDictionary[Dataset, Measured] = WeakKeyDictionary()


def measure(dataset: Dataset) -> Measured:
    """Measure the token pairs of ``dataset``, in the columns of either API: once, and a few rows at a time.

    Raises:
        ValueError: It has no such columns.
    """
    if dataset not in _MEASURED:
        columns = id_columns(dataset.column_names)
        if columns is None:
            raise ValueError(f"no pairs of token ids in the columns {dataset.column_names}")
        remember(dataset, measure_tables(tables_of(dataset, with_labels(columns, dataset)), columns))
    return _MEASURED[dataset]


def remember(dataset: Dataset, measured: Measured) -> None:
    """Let `measure` return this for ``dataset``, for as long as that is in use."""
    _MEASURED[dataset] = measured


def measure_tables(tables: Iterable[pa.Table], columns: Sequence[str]) -> Measured:
    """Measure the token pairs of arrow tables, one after another.

    Args:
        tables: They have ``columns``, perhaps labels, and nothing else.
        columns: The names of the chosen and of the rejected token ids, or that of all answers'.
    """
    parts: list[PairLengths] = []
    shared: np.ndarray | None = None
    checksums: dict[str, int] = {}  # one each, so that it does not matter where a table ends and the next begins

    def check(name: str, content: Any) -> None:
        checksums[name] = crc32(content, checksums.get(name, 0))

    for table in tables:
        lists = {name: flat(each) for name, each in dialogues_of(table, columns).items()}
        part = _lengths([*lists.values()], rows_of(table, columns))
        if columns == SOLUTION:  # of its nested dialogues the longest has all tokens
            most = labels_in(table).max(initial=1)
            part = PairLengths(0 * part.prefix_P, np.pad(part.prefix_P[:, None], ((0, 0), (0, most - 1))))
        parts.append(part)
        for name, (values_T, ends_D) in lists.items():
            shared = _shared(shared, values_T, ends_D)
            check(name, np.ascontiguousarray(values_T, dtype=np.int64).data)
            check(f"lengths of {name}", np.ascontiguousarray(np.diff(ends_D), dtype=np.int64).data)
        for label in set(table.column_names) - set(columns):
            check(label, "".join(f"{value}," for value in table[label].to_pylist()).encode())
    lengths = PairLengths.joined(parts)
    return Measured(lengths, 0 if shared is None else len(shared), crc32(repr(sorted(checksums.items())).encode()))


def has_many(dataset: Any) -> bool:
    """Tell whether a prepared dataset's rows are rankings or solutions with steps, and not pairs."""
    return isinstance(dataset, Dataset) and id_columns(dataset.column_names) in (_ANSWERS, SOLUTION)


def has_steps(dataset: Any) -> bool:
    """Tell whether a prepared dataset's rows are solutions with steps."""
    return isinstance(dataset, Dataset) and id_columns(dataset.column_names) == SOLUTION


def most_answers(dataset: Any) -> int:
    """Return K, the most answers or steps of a prepared dataset's rows."""
    return measure(dataset).answers if has_many(dataset) else 2


def dialogues_in(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return the token ids of a row's dialogues, chosen first; of a solution, up to the end of each step.

    A solution without a label is one dialogue, of which the loss reads nothing.
    """
    columns = id_columns(row)
    if columns is None:
        raise KeyError(f"no token ids in the columns {list(row)}")
    if columns == SOLUTION:
        ids, ends = np.asarray(row["input_ids"], np.int32), np.flatnonzero(np.asarray(row["labels"]) != NO_LABEL)
        return [ids[: end + 1] for end in ends] or [ids]
    return [row[column] for column in columns] if len(columns) == 2 else row[columns[0]]


def id_columns(columns: Iterable[str]) -> tuple[str, ...] | None:
    """Name the columns of token ids, chosen and rejected of either API or all of a row; None where there are none."""
    return next((names for names in _COLUMNS if set(names) <= set(columns)), None)


def with_labels(columns: tuple[str, ...], dataset: Dataset) -> tuple[str, ...]:
    """Add the columns of labels that the dataset has."""
    labels = _LABELS.get(columns, _LABELS_OF_PAIRS)
    return (*columns, *(label for label in labels if label in dataset.column_names))


def labels_in(table: pa.Table) -> np.ndarray:
    """Return how many labels each solution has, [N]."""
    labels_T, ends_N = flat(table["labels"])
    return np.diff(np.pad(np.cumsum(labels_T != NO_LABEL), (1, 0))[ends_N])


def tables_of(dataset: Dataset, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read the columns as arrow tables of many rows."""
    return dataset.with_format("arrow", columns=list(columns)).iter(batch_size=1000)


def dialogues_of(table: pa.Table, columns: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    """Return the token ids of each column, a list a dialogue; a column of all answers has several a row.

    A solution is one: what is longest and shared in it is so up to each step, too.
    """
    lists = {column: table[column] for column in columns}
    return {column: pc.list_flatten(each) for column, each in lists.items()} if columns == _ANSWERS else lists


def rows_of(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return the row of each dialogue, those of one column after another [D]."""
    rows_N = np.arange(len(table))
    if columns == _ANSWERS:
        return np.repeat(rows_N, lengths_of(table, columns)[0])
    return np.tile(rows_N, len(columns))


def longest_of(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return how many tokens the longest dialogue of each row has, [N]."""
    longest_N = np.zeros(len(table), np.int64)
    lengths_D = np.concatenate(
        [pc.list_value_length(each).to_numpy() for each in dialogues_of(table, columns).values()]
    )
    np.maximum.at(longest_N, rows_of(table, columns), lengths_D)
    return longest_N


def lengths_of(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return the lengths of each column's lists, [columns, N]: tokens, or answers of a column of all."""
    return np.stack([pc.list_value_length(table[column]).to_numpy() for column in columns])


_Flat = tuple[np.ndarray, np.ndarray]


def flat(lists: pa.ChunkedArray) -> _Flat:
    """Return all lists' values one after another, and where each list ends in them, from 0."""
    ends_N = np.cumsum(pc.list_value_length(lists).to_numpy(), dtype=np.int64)
    return pc.list_flatten(lists).to_numpy(), np.concatenate([[0], ends_N])


def _lengths(lists: Sequence[_Flat], rows_D: np.ndarray) -> PairLengths:
    """Return each row's common prefix and the tails after it, of dialogues [D] that lie one after another."""
    values_T = np.concatenate([values_T for values_T, _ in lists])
    lengths_D = np.concatenate([np.diff(ends_D) for _, ends_D in lists])
    starts_D = np.cumsum(lengths_D) - lengths_D
    by_row_D = np.argsort(rows_D, kind="stable")
    _, firsts_N, answers_N = np.unique(rows_D[by_row_D], return_index=True, return_counts=True)
    answer_D = np.arange(len(rows_D)) - np.repeat(firsts_N, answers_N)
    first_D = by_row_D[np.repeat(firsts_N, answers_N)]
    other_M, first_M = by_row_D[answer_D > 0], first_D[answer_D > 0]
    # token by token through the common length of all at once; first differences end the prefixes
    shorter_M = np.minimum(lengths_D[first_M], lengths_D[other_M])
    begins_M = np.cumsum(shorter_M) - shorter_M
    within_T = np.arange(shorter_M.sum()) - np.repeat(begins_M, shorter_M)
    same_T = (
        values_T[np.repeat(starts_D[first_M], shorter_M) + within_T]
        == values_T[np.repeat(starts_D[other_M], shorter_M) + within_T]
    )
    first_T = np.where(same_T, np.repeat(shorter_M, shorter_M), within_T)
    prefix_M = np.zeros_like(shorter_M)
    some = shorter_M > 0
    if some.any():
        prefix_M[some] = np.minimum.reduceat(first_T, begins_M[some])
    prefix_N = lengths_D[by_row_D[firsts_N]]
    np.minimum.at(prefix_N, rows_D[other_M], prefix_M)
    tails_NK = np.zeros((len(prefix_N), answers_N.max(initial=2)), np.int64)
    tails_NK[rows_D[by_row_D], answer_D] = lengths_D[by_row_D] - np.repeat(prefix_N, answers_N)
    return PairLengths(prefix_N, tails_NK)


def _shared(shared: np.ndarray | None, values_T: np.ndarray, ends_N: np.ndarray) -> np.ndarray | None:
    """Return the first tokens that ``shared`` and all these lists have in common; None before there is any list."""
    starts_N, lengths_N = ends_N[:-1], np.diff(ends_N)
    if not len(lengths_N):
        return shared
    shared = values_T[: lengths_N[0]] if shared is None else shared
    shared = shared[: lengths_N.min()]
    differs = (depth for depth, token in enumerate(shared) if (values_T[starts_N + depth] != token).any())
    return shared[: next(differs, len(shared))].copy()  # a view would keep all tokens of its table
