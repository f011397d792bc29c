"""Pairs that share a prompt: found by their tokens, and handed out together."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler

from .measure import flat, id_columns, measure, tables_of

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no power of it vanishes
_MORE = 16  # the first tokens that a pair's answers may have in common, of which nothing tells that they are no prompt


_GROUPS: WeakKeyDictionary[Dataset, np.ndarray] = WeakKeyDictionary()


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """Return `_prompt_groups` of a dataset, found once."""
    if dataset not in _GROUPS:
        _GROUPS[dataset] = _prompt_groups(dataset)
    return _GROUPS[dataset]


def _prompt_groups(dataset: Dataset) -> np.ndarray:
    """Number the pairs of token ids, so that those that share a prompt have the same number [N].

    What a pair's dialogues share is the prompt, and some more tokens if its answers begin alike. So a prompt is what
    the dialogues of some pair share, and its pairs are those whose dialogues share it and at most a few tokens more.
    What all dialogues of the dataset share, a system prompt say, is none.
    """
    measured = measure(dataset)
    columns: Any = id_columns(dataset.column_names)  # which `measure` has read
    depth_NK = np.maximum(measured.lengths.prefix_P[:, None] - np.arange(_MORE), 0)
    hash_NK = np.zeros(depth_NK.shape, np.uint64)  # of as many first tokens
    power_L = np.cumprod(np.full(measured.longest_N.max(initial=0), _BASE))
    first = 0
    for table in tables_of(dataset, columns[:1]):
        values_T, ends_N = flat(table[columns[0]])
        within_T = np.arange(len(values_T)) - np.repeat(ends_N[:-1], np.diff(ends_N))
        sum_T = np.append(np.uint64(0), np.cumsum((values_T + 1).astype(np.uint64) * power_L[within_T]))  # mod 2^64
        here, start_N1 = slice(first, first + len(table)), ends_N[:-1, None]
        hash_NK[here] = sum_T[start_N1 + depth_NK[here]] - sum_T[start_N1]
        first = here.stop
    is_more_NK = depth_NK > measured.shared_prefix
    found_NK = is_more_NK & np.isin(hash_NK, hash_NK[is_more_NK[:, 0], 0])
    each_N, shortest_N = np.arange(first), _MORE - 1 - found_NK[:, ::-1].argmax(axis=1)
    key_N = np.where(found_NK.any(axis=1), hash_NK[each_N, shortest_N], each_N.astype(np.uint64))
    return np.unique(key_N, return_inverse=True)[1]


class ByPrompt(Sampler[int]):
    """Hands out each group's pairs one after another, in another order each epoch, which is the same everywhere.

    The groups' order is random, and so is that of updates: those that one group fills do not follow one another.

    Args:
        group_N: From `prompt_groups`.
        pairs: Of an update, over all processes.
        seed: Of the run.
    """

    def __init__(self, group_N: np.ndarray, pairs: int, seed: int = 0) -> None:
        self._group_N, self._pairs, self._seed, self._epoch = group_N, pairs, seed, 0

    def __len__(self) -> int:
        return len(self._group_N)

    def set_epoch(self, epoch: int) -> None:
        """Choose the next order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator, count = np.random.default_rng([self._seed, self._epoch]), len(self)
        order_N = np.lexsort((generator.permutation(count), generator.permutation(count)[self._group_N]))
        whole = count - count % self._pairs
        yield from generator.permutation(order_N[:whole].reshape(-1, self._pairs)).ravel().tolist()
        yield from order_N[whole:].tolist()
        self._epoch += 1
