"""Rows that share a prompt: handed out together, or counted where evaluation data repeats training data."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from torch.utils.data import Sampler

from .measure import ANSWERS, flat, is_prepared, measure, tables_of

logger = logging.getLogger(__name__)

_PROMPT = 8  # the fewest tokens that are taken for a prompt, where nothing else tells
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


def _shared(dataset: Dataset, skip: int | None = None) -> Iterator[bytes]:
    """Yield the tokens that each row's answers begin with alike, 4 bytes each, without the first ``skip``.

    By default those are skipped that all rows share.
    """
    measured = measure(dataset)
    skip = measured.shared_prefix if skip is None else skip
    prefixes = iter(measured.lengths.prefix_P.tolist())
    for table in tables_of(dataset):
        values_T, ends_D = flat(pc.list_flatten(table[ANSWERS]))
        firsts_N = np.cumsum(pc.list_value_length(table[ANSWERS]).to_numpy()) - pc.list_value_length(table[ANSWERS])
        ids = values_T.astype(np.uint32).tobytes()
        for start, prefix in zip(ends_D[firsts_N].tolist(), prefixes, strict=False):
            yield ids[4 * (start + skip) : 4 * (start + prefix)]


def prompts_in_training(train: Any, evaluation: Any, name: str = "") -> tuple[int, ...]:
    """Return how many distinct prompts of prepared evaluation data the training data has too, and their number.

    Any are also logged. Empty for streams. A prompt is the column `prompt`, or else the tokens that a row's answers
    begin with alike, if they are several more than all rows share.

    Args:
        name: That of the evaluation data, if it is one of several.
    """
    both = (train, evaluation)
    if not all(map(is_prepared, both)):
        return ()
    if all("prompt" in each.column_names for each in both):
        known, prompts = ({hash(json.dumps(value)) for value in each["prompt"] if value} for each in both)
    else:
        least = [4 * (measure(each).shared_prefix + _PROMPT) for each in both]
        known, prompts = (
            {hash(ids) for ids in _shared(each, 0) if len(ids) >= size} for each, size in zip(both, least, strict=True)
        )
    shared = len(known & prompts) if len(known | prompts) > 1 else 0  # one prompt for all rows is none
    if shared:
        of = f" of {name!r}" if name else ""
        logger.warning(f"{shared:,} of {len(prompts):,} evaluation prompts{of} also occur in the training data.")
    return shared, len(prompts)


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
