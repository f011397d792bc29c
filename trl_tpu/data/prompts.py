"""Pairs that share a prompt: found by their tokens, and handed out together."""

from collections.abc import Iterator

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler

from .measure import flat, id_columns, measure, tables_of

_MORE = 16  # the first tokens that a pair's answers may have in common, of which nothing tells that they are no prompt


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """Number the pairs of token ids, so that those that share a prompt have the same number [N].

    What a pair's dialogues share is the prompt, and some more tokens if its answers begin alike. So a prompt is what
    the dialogues of some pair share, and its pairs are those whose dialogues share it and at most a few tokens more.
    What all dialogues of the dataset share, a system prompt say, is none.
    """
    prompt_of: dict[bytes, bytes] = {}  # of what a pair's dialogues share
    around = [b""]  # in lexicographic order, the prompts that what comes next may begin with
    for shared in sorted(set(_shared(dataset))):
        while not shared.startswith(around[-1]):
            around.pop()
        if not around[-1] or len(shared) - len(around[-1]) > 4 * _MORE:
            around.append(shared)
        prompt_of[shared] = around[-1]
    numbers: dict[bytes | int, int] = {}
    keys = (prompt_of[shared] or pair for pair, shared in enumerate(_shared(dataset)))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _shared(dataset: Dataset) -> Iterator[bytes]:
    """Yield the tokens that each pair's dialogues begin with alike, 4 bytes each, without those of all dialogues."""
    measured, columns = measure(dataset), id_columns(dataset.column_names)
    assert columns is not None  # which `measure` has read
    prefixes = iter(measured.lengths.prefix_P.tolist())
    for table in tables_of(dataset, columns[:1]):
        values_T, ends_N = flat(table[columns[0]])
        ids = values_T.astype(np.uint32).tobytes()
        for start, prefix in zip(ends_N[:-1].tolist(), prefixes, strict=False):
            yield ids[4 * (start + measured.shared_prefix) : 4 * (start + prefix)]


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
