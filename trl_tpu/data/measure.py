"""Measures what packing must know of a whole dataset before it starts, from its arrow columns."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from datasets import Dataset


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


def longer_dialogues(dataset: Dataset) -> np.ndarray:
    """Return how many tokens the longer dialogue of each pair has [N], in the columns of either API."""
    columns = [c for c in dataset.column_names if c in ("chosen_ids", "rejected_ids") or c.startswith("input_ids_")]
    chunks = dataset.with_format("arrow", columns=columns).iter(batch_size=10_000)
    longer = [np.max([np.diff(_flat(chunk[column])[1]) for column in columns], axis=0) for chunk in chunks]
    return np.concatenate(longer) if longer else np.zeros(0, dtype=np.int64)


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
    array = lists.combine_chunks() if hasattr(lists, "combine_chunks") else lists
    lengths = np.diff(array.offsets.to_numpy(zero_copy_only=False))
    return array.flatten().to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(lengths)])
