"""Makes training's batches of dialogues that are only to be scored: which of them are pairs, and by which collator.

In lexicographic order those dialogues are neighbors that share most: the answers to a prompt, and prompts that begin
alike. For packed rows two neighbors that share a part are a pair, and any other dialogue is one with itself: what a
pair shares is computed once, so that takes the dialogue's own tokens. In padded rows nothing is shared, so there two
dialogues of about one length are a pair.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.collators import DataCollatorForPreference, PairRows, PlannedRows, UnpaddedRow
from ..packing.schedule import RowPlan
from ..packing.shapes import RowShape, round_up
from ..packing.trie import in_order

_SHORTEST_ROW = 128
_SHORTEST_PADDED_ROW = 64
_PAIRS = 1024  # that are packed together
_SHARED_PART = 0.25  # of a dialogue: what the next must share, to be a pair with it
_USUAL = 0.75  # of the dialogues fit three times into a usual row

#: Which two dialogues each pair of a batch is, [P, 2], and what a collator makes of them.
Batch = tuple[np.ndarray, dict[str, Any]]


@dataclass
class Batches:
    """Makes batches of dialogues, each of which is in one of them.

    Args:
        pad_token_id: Texts end before it, and it fills what rows have left.
        tokens: Most tokens computed at a time on each shard, padding among them, unless one row is longer.
        attention_crossover_length: The length at which attention costs as much as everything else.
        shards: Over how many devices rows are split.
        is_static: Whether there may only be few shapes.
    """

    pad_token_id: int
    tokens: int
    attention_crossover_length: float
    shards: int = 1
    is_static: bool = False
    row_length: int | None = None
    """Of usual planned rows; chosen for the first dialogues that come."""

    def unpadded(self, dialogues: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Yield rows without padding, for a device that takes any shape."""
        collate = UnpaddedRow(self.pad_token_id, self.attention_crossover_length)
        some: list[tuple[int, int]] = []
        tokens = 0
        for size, shared, pair in _neighbors(dialogues, self.tokens):
            if some and (tokens + size - shared > self.tokens or len(some) == _PAIRS):
                yield _batch(collate, dialogues, some)
                some, tokens = [], 0
            tokens += size - (shared if some else 0)
            some.append(pair)
        if some:
            yield _batch(collate, dialogues, some)

    def planned(self, dialogues: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Yield rows of one length, and of its doubles for longer dialogues, for a device that compiles each."""
        if self.row_length is None and dialogues:
            usual = np.quantile([len(ids) for ids in dialogues], _USUAL)
            self.row_length = _doubled(_SHORTEST_ROW, 3 * usual)
        length = self.row_length or _SHORTEST_ROW
        by_length: dict[int, list[tuple[int, int]]] = {}
        for size, _, pair in _neighbors(dialogues, length):
            by_length.setdefault(_doubled(length, size), []).append(pair)
        pairs = round_up(_PAIRS, self.shards)
        for length, members in sorted(by_length.items()):
            shape = RowShape(self.shards * max(1, self.tokens // length), length)
            plan = RowPlan((shape,), (shape,), self.attention_crossover_length)
            collate = PlannedRows(plan, pairs, self.pad_token_id)
            for first in range(0, len(members), pairs):
                yield _batch(collate, dialogues, members[first : first + pairs])

    def padded(self, dialogues: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Yield padded rows, for models of which packed rows are not exact, and to keep dialogues apart."""
        waiting = sorted(range(len(dialogues)), key=lambda index: -len(dialogues[index]))
        while waiting:
            longest = len(dialogues[waiting[0]])
            length = _doubled(_SHORTEST_PADDED_ROW, longest) if self.is_static else longest
            pairs = self.shards * max(1, self.tokens // length // 2)
            some, waiting = waiting[: 2 * pairs], waiting[2 * pairs :]
            some += some[-1:] * (len(some) % 2)
            collate: Any = DataCollatorForPreference(self.pad_token_id, pad_to_multiple_of=length)
            if self.is_static:
                collate = PairRows(collate, pairs, self.pad_token_id)
            yield _batch(collate, dialogues, list(zip(some[::2], some[1::2], strict=True)))


def _neighbors(dialogues: Sequence[np.ndarray], most: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield pairs of neighbors in lexicographic order, and dialogues that share too little with themselves.

    Before each pair how many tokens it has, its common prefix once, and how many of these the pair before it has.

    Args:
        most: Most tokens of two neighbors.
    """
    order, shared = (each.tolist() for each in in_order(list(dialogues)))
    shared = [0, *shared, 0]  # of each dialogue with the one before it
    place = 0
    while place < len(order):
        size, common, before = len(dialogues[order[place]]), shared[place + 1], shared[place]
        last = min(place + 1, len(order) - 1)
        both = size + len(dialogues[order[last]]) - common
        if common < _SHARED_PART * size or both > most:
            last, both = place, size
        yield both, before, (order[place], order[last])
        place = last + 1


def _doubled(length: int, least: float) -> int:
    """Return ``length``, doubled until it is no less than ``least``."""
    while length < least:
        length *= 2
    return length


def _batch(collate: Any, dialogues: Sequence[np.ndarray], pairs: list[tuple[int, int]]) -> Batch:
    examples = [{"chosen_ids": dialogues[one].tolist(), "rejected_ids": dialogues[two].tolist()} for one, two in pairs]
    return np.array(pairs), collate(examples)
