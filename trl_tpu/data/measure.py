"""Measures what batches must know of a whole dataset before training starts, once, from its arrow columns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ..packing.lengths import PairLengths

_COLUMNS = ("chosen_ids", "rejected_ids"), ("input_ids_chosen", "input_ids_rejected")


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
    def dialogues_N2(self) -> np.ndarray:
        """Tokens of each dialogue, the chosen one first."""
        return self.lengths.prefix_P[:, None] + np.stack([self.lengths.chosen_P, self.lengths.rejected_P], axis=1)

    @property
    def longest_N(self) -> np.ndarray:
        """Tokens of the longer dialogue of each pair."""
        return self.dialogues_N2.max(axis=1)


_MEASURED: WeakKeyDictionary[Dataset, Measured] = WeakKeyDictionary()


def measure(dataset: Dataset) -> Measured:
    """Measure the token pairs of ``dataset``, in the columns of either API: once, and a few rows at a time.

    Raises:
        ValueError: It has no such columns.
    """
    if dataset not in _MEASURED:
        columns = id_columns(dataset)
        if columns is None:
            raise ValueError(f"no pairs of token ids in the columns {dataset.column_names}")
        remember(dataset, measure_tables(tables_of(dataset, with_margin(columns, dataset)), columns))
    return _MEASURED[dataset]


def remember(dataset: Dataset, measured: Measured) -> None:
    """Let `measure` return this for ``dataset``, for as long as that is in use."""
    _MEASURED[dataset] = measured


def measure_tables(tables: Iterable[pa.Table], columns: tuple[str, str]) -> Measured:
    """Measure the token pairs of arrow tables, one after another.

    Args:
        tables: They have ``columns``, and perhaps ``margin``.
        columns: The names of the chosen and of the rejected token ids.
    """
    parts: list[np.ndarray] = []
    shared: np.ndarray | None = None
    checksums: dict[str, int] = {}  # one each, so that it does not matter where a table ends and the next begins
    for table in tables:
        halves = {name: flat(table[name]) for name in columns}
        parts.append(_lengths(*halves.values()))
        for name, (values_T, ends_N) in halves.items():
            shared = _shared(shared, values_T, ends_N)
            for key, numbers in ((name, values_T), (f"lengths of {name}", np.diff(ends_N))):
                checksums[key] = crc32(np.ascontiguousarray(numbers, dtype=np.int64).data, checksums.get(key, 0))
        if "margin" in table.column_names:
            margins = "".join(f"{margin}," for margin in table["margin"].to_pylist())
            checksums["margin"] = crc32(margins.encode(), checksums.get("margin", 0))
    lengths = PairLengths(*np.concatenate(parts, axis=1)) if parts else PairLengths.of([])
    return Measured(lengths, 0 if shared is None else len(shared), crc32(repr(sorted(checksums.items())).encode()))


def id_columns(dataset: Dataset) -> tuple[str, str] | None:
    """Name the columns of token ids, chosen and rejected, of either API; None where there are none."""
    return next((names for names in _COLUMNS if set(names) <= set(dataset.column_names)), None)


def with_margin(columns: tuple[str, str], dataset: Dataset) -> tuple[str, ...]:
    """Add the column of target margins, where the dataset has it."""
    return (*columns, "margin") if "margin" in dataset.column_names else columns


def tables_of(dataset: Dataset, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read the columns as arrow tables of many rows."""
    return dataset.with_format("arrow", columns=list(columns)).iter(batch_size=1000)


def lengths_of(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return how many tokens each dialogue of each column has, [columns, N]."""
    return np.stack([pc.list_value_length(table[column]).to_numpy() for column in columns])


_Flat = tuple[np.ndarray, np.ndarray]


def flat(lists: pa.ChunkedArray) -> _Flat:
    """Return all lists' values one after another, and where each list ends in them, from 0."""
    ends_N = np.cumsum(pc.list_value_length(lists).to_numpy(), dtype=np.int64)
    return pc.list_flatten(lists).to_numpy(), np.concatenate([[0], ends_N])


def _lengths(chosen: _Flat, rejected: _Flat) -> np.ndarray:
    """Return each pair's common prefix and both tails, [3, N]."""
    (chosen_T, chosen_ends_N), (rejected_T, rejected_ends_N) = chosen, rejected
    chosen_N, rejected_N = np.diff(chosen_ends_N), np.diff(rejected_ends_N)
    shorter_N = np.minimum(chosen_N, rejected_N)
    # token by token through the common length of all pairs at once; first differences end the prefixes
    starts_N = np.cumsum(shorter_N) - shorter_N
    within_T = np.arange(shorter_N.sum()) - np.repeat(starts_N, shorter_N)
    same_T = (
        chosen_T[np.repeat(chosen_ends_N[:-1], shorter_N) + within_T]
        == (rejected_T[np.repeat(rejected_ends_N[:-1], shorter_N) + within_T])
    )
    first_T = np.where(same_T, np.repeat(shorter_N, shorter_N), within_T)
    prefix_N = np.zeros_like(shorter_N)
    some = shorter_N > 0
    if some.any():
        prefix_N[some] = np.minimum.reduceat(first_T, starts_N[some])
    return np.stack([prefix_N, chosen_N - prefix_N, rejected_N - prefix_N])


def _shared(shared: np.ndarray | None, values_T: np.ndarray, ends_N: np.ndarray) -> np.ndarray | None:
    """Return the first tokens that ``shared`` and all these lists have in common; None before there is any list."""
    starts_N, lengths_N = ends_N[:-1], np.diff(ends_N)
    if not len(lengths_N):
        return shared
    shared = values_T[: lengths_N[0]] if shared is None else shared
    shared = shared[: lengths_N.min()]
    differs = (depth for depth, token in enumerate(shared) if (values_T[starts_N + depth] != token).any())
    return shared[: next(differs, len(shared))].copy()  # a view would keep all tokens of its table
