"""Pairs that share a prompt: found by their tokens, and handed out together."""

from collections.abc import Iterator

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler

from ..packing.trie import in_order
from .measure import flat, id_columns, measure, tables_of

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no power of it vanishes
_DRAWN = 2048  # pairs, or more where they are too few batches
_ANSWERS_SHARE = 16  # first tokens that the answers of a pair may have in common, with each prompt still found


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """Number the pairs of token ids so that those of one prompt have the same number [N].

    Nothing tells tokens of the prompt from those of answers that begin alike. So pairs share a prompt where what the
    dialogues of each share ends with the prompt, or few tokens after it, and with the prompt itself in some pair.
    What all dialogues of the dataset share, such as a system prompt, is none.
    """
    measured, columns = measure(dataset), id_columns(dataset)
    assert columns is not None  # or `measure` would have refused it
    depth_NK = np.maximum(measured.lengths.prefix_P[:, None] - np.arange(_ANSWERS_SHARE), 0)
    power_L = np.cumprod(np.full(measured.longest_N.max(initial=0), _BASE))
    hash_NK = np.zeros(depth_NK.shape, np.uint64)  # of a dialogue's tokens up to each depth
    first = 0
    for table in tables_of(dataset, columns[:1]):
        values_T, ends_N = flat(table[columns[0]])
        within_T = np.arange(len(values_T)) - np.repeat(ends_N[:-1], np.diff(ends_N))
        sums_T = np.cumsum((values_T + 1).astype(np.uint64) * power_L[within_T])  # modulo 2^64
        sums_T = np.concatenate([np.zeros(1, np.uint64), sums_T])
        here = slice(first, first := first + len(table))
        start_N1 = ends_N[:-1, None]
        hash_NK[here] = sums_T[start_N1 + depth_NK[here]] - sums_T[start_N1]
    is_more_NK = depth_NK > measured.shared_prefix
    found_NK = is_more_NK & np.isin(hash_NK, hash_NK[is_more_NK[:, 0], 0])
    shortest_N = _ANSWERS_SHARE - 1 - found_NK[:, ::-1].argmax(axis=1)
    each_N = np.arange(first, dtype=np.uint64)
    return np.unique(np.where(found_NK.any(axis=1), hash_NK[each_N, shortest_N], each_N), return_inverse=True)[1]


class ByPrompt(Sampler[int]):
    """Hands out pairs of a group one after another: another permutation for each (seed, epoch), the same everywhere.

    The groups are in a random order, and so are the updates: those that a large group is in do not follow one another.

    Args:
        group_N: From `prompt_groups`.
        pairs: Of an update, over all processes.
        seed: Of the run.
        epoch: The first.
    """

    def __init__(self, group_N: np.ndarray, pairs: int, seed: int, epoch: int = 0) -> None:
        self._group_N, self._pairs, self._seed, self._epoch = group_N, pairs, seed, epoch

    def __len__(self) -> int:
        return len(self._group_N)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def order(self) -> np.ndarray:
        """Return the rows in the epoch's order [N]."""
        generator, count = np.random.default_rng([self._seed, self._epoch]), len(self)
        place_N = generator.permutation(count)[self._group_N]
        order_N = np.lexsort((generator.permutation(count), place_N))
        whole = count - count % self._pairs
        updates_UP = generator.permutation(order_N[:whole].reshape(-1, self._pairs))
        return np.concatenate([updates_UP.ravel(), order_N[whole:]])

    def __iter__(self) -> Iterator[int]:
        yield from self.order().tolist()
        self._epoch += 1


def tokens_added(dataset: Dataset, rows: np.ndarray, pairs: int) -> np.ndarray:
    """Return the tokens that each pair adds to its batch, [B, P], where dialogues' common beginnings count once.

    What all dialogues of the dataset share is not counted.

    Args:
        rows: In the order of training; the first batches of them are drawn.
        pairs: P.
    """
    columns, shared_prefix = id_columns(dataset), measure(dataset).shared_prefix
    assert columns is not None
    added_BP = []
    for first in range(0, min(max(_DRAWN, 48 * pairs), len(rows) // pairs * pairs), pairs):
        batch = dataset[rows[first : first + pairs]]
        dialogues = [np.asarray(ids) for pair in zip(*(batch[name] for name in columns), strict=True) for ids in pair]
        order, shared = in_order(dialogues)
        added_D = np.array([len(ids) for ids in dialogues])
        added_D[order] -= [shared_prefix, *shared]
        added_BP.append(added_D.reshape(pairs, 2).sum(axis=1))
    return np.array(added_BP)
