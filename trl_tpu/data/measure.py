"""Measures what packing must know of a whole dataset before it starts, from its arrow columns."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ..packing.lengths import PairLengths

_COLUMNS = ("chosen_ids", "rejected_ids"), ("input_ids_chosen", "input_ids_rejected")


def id_columns(dataset: Dataset) -> tuple[str, str] | None:
    """Name the columns of token ids, chosen and rejected, of either API; None where there are none."""
    return next((names for names in _COLUMNS if set(names) <= set(dataset.column_names)), None)


def tables_of(dataset: Dataset, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read the columns as arrow tables of many rows."""
    return dataset.with_format("arrow", columns=list(columns)).iter(batch_size=1000)


def pair_sizes(chosen: pa.ChunkedArray, rejected: pa.ChunkedArray) -> np.ndarray:
    """Return how many tokens each pair takes in a row [N]: both dialogues, with their common prefix counted once.

    Args:
        chosen: Lists of token ids.
        rejected: As many.
    """
    (chosen_T, chosen_ends_N), (rejected_T, rejected_ends_N) = _flat(chosen), _flat(rejected)
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
    return chosen_N + rejected_N - prefix_N


def pair_lengths(dataset: Dataset) -> PairLengths:
    """Measure the pairs of ``dataset``, in the columns of either API.

    Raises:
        ValueError: It has neither's.
    """
    names = id_columns(dataset)
    if names is None:
        raise ValueError(f"no pairs of token ids in the columns {dataset.column_names}")
    parts = [_triples(*(table[name] for name in names)) for table in tables_of(dataset, names)]
    return PairLengths(*np.concatenate(parts, axis=1)) if parts else PairLengths.of([])


def _triples(chosen: pa.ChunkedArray, rejected: pa.ChunkedArray) -> np.ndarray:
    """Return each pair's prefix and both tails, [3, N]."""
    sizes_N = pair_sizes(chosen, rejected).astype(np.int64)
    chosen_N, rejected_N = (pc.list_value_length(each).to_numpy().astype(np.int64) for each in (chosen, rejected))
    prefix_N = chosen_N + rejected_N - sizes_N
    return np.stack([prefix_N, chosen_N - prefix_N, rejected_N - prefix_N])


def longer_dialogues(dataset: Dataset) -> np.ndarray:
    """Return how many tokens the longer dialogue of each pair has [N], in the columns of either API."""
    columns = [c for c in dataset.column_names if c in ("chosen_ids", "rejected_ids") or c.startswith("input_ids_")]
    longer = [lengths_of(table, columns).max(axis=0) for table in tables_of(dataset, columns)]
    return np.concatenate(longer) if longer else np.zeros(0, dtype=np.int64)


def lengths_of(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return how many tokens each dialogue of each column has, [columns, N]."""
    return np.stack([pc.list_value_length(table[column]).to_numpy() for column in columns])


def shared_prefix_length(columns: Iterable[pa.ChunkedArray]) -> int:
    """Return how many first tokens all dialogues of ``columns`` share, such as a system prompt."""
    first: np.ndarray | None = None
    for column in columns:
        values_T, ends_N = _flat(column)
        starts_N, lengths_N = ends_N[:-1], np.diff(ends_N)
        first = values_T[: lengths_N[0]] if first is None else first
        first = first[: lengths_N.min()]
        differs = (depth for depth, token in enumerate(first) if (values_T[starts_N + depth] != token).any())
        first = first[: next(differs, len(first))]
    return 0 if first is None else len(first)


def _flat(lists: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return all lists' values one after another, and where each list ends in them, from 0."""
    ends_N = np.cumsum(pc.list_value_length(lists).to_numpy())
    return pc.list_flatten(lists).to_numpy(), np.concatenate([[0], ends_N])
