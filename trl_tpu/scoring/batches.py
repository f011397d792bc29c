"""Makes training's batches of dialogues that are only to be scored: each is the one answer of a row.

In lexicographic order those are neighbors that share most, the answers to a prompt, and prompts that begin alike: they
come into one batch, whose packed rows hold what they share once. Padded rows share nothing, so there a batch has
dialogues of about one length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.batch import Batch
from ..data.collators import OwnRows, Padded, Part, PlannedRows, Table, Unpadded
from ..packing.schedule import RowPlan
from ..packing.shapes import RowShape, round_up
from ..packing.trie import in_order

_SHORTEST_ROW = 128
_SHORTEST_PADDED_ROW = 64
_MOST = 2048  # dialogues that are packed together
_USUAL = 0.75  # of the dialogues fit three times into a usual row

_TABLE = Table(answers=1)  # nothing is compared

#: Which dialogues a batch has, [N], and its micro-batches.
Members = tuple[np.ndarray, tuple[Batch, ...]]


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

    def unpadded(self, dialogues: Sequence[np.ndarray]) -> Iterator[Members]:
        """Yield rows without padding, for a device that takes any shape."""
        collate = OwnRows(Unpadded(self.pad_token_id, 1, self.attention_crossover_length), self.pad_token_id, _TABLE)
        order, shared = in_order(list(dialogues))
        some, tokens = list[int](), 0
        for index, common in zip(order.tolist(), [0, *shared.tolist()], strict=False):
            size = len(dialogues[index])
            if some and (tokens + size - common > self.tokens or len(some) == _MOST):
                yield _batch(collate, dialogues, some)
                some, tokens = [], 0
            tokens += size - (common if some else 0)
            some.append(index)
        if some:
            yield _batch(collate, dialogues, some)

    def planned(self, dialogues: Sequence[np.ndarray]) -> Iterator[Members]:
        """Yield rows of one length, and of its doubles for longer dialogues, for a device that compiles each."""
        if self.row_length is None and dialogues:
            usual = np.quantile([len(ids) for ids in dialogues], _USUAL)
            self.row_length = _doubled(_SHORTEST_ROW, 3 * usual)
        by_length: dict[int, list[int]] = {}
        for index in in_order(list(dialogues))[0].tolist():
            length = _doubled(self.row_length or _SHORTEST_ROW, len(dialogues[index]))
            by_length.setdefault(length, []).append(index)
        most = round_up(_MOST, self.shards)
        for length, members in sorted(by_length.items()):
            shape = RowShape(self.shards * max(1, self.tokens // length), length)
            plan = RowPlan((shape,), (shape,), self.attention_crossover_length)
            collate = PlannedRows(plan, most, self.pad_token_id, _TABLE)
            for first in range(0, len(members), most):
                yield _batch(collate, dialogues, members[first : first + most])

    def padded(self, dialogues: Sequence[np.ndarray]) -> Iterator[Members]:
        """Yield padded rows, for models of which packed rows are not exact, and to keep dialogues apart."""
        waiting = sorted(range(len(dialogues)), key=lambda index: -len(dialogues[index]))
        while waiting:
            longest = len(dialogues[waiting[0]])
            length = _doubled(_SHORTEST_PADDED_ROW, longest) if self.is_static else longest
            most = self.shards * max(1, self.tokens // length)
            some, waiting = waiting[:most], waiting[most:]
            lengths, part = ((length,), Part(most)) if self.is_static else (None, None)
            collate = OwnRows(Padded(self.pad_token_id, 1, 1, lengths), self.pad_token_id, _TABLE, part)
            yield _batch(collate, dialogues, some)


def _doubled(length: int, least: float) -> int:
    """Return ``length``, doubled until it is no less than ``least``."""
    while length < least:
        length *= 2
    return length


def _batch(collate: Any, dialogues: Sequence[np.ndarray], members: list[int]) -> Members:
    return np.array(members), collate([{"answers": [dialogues[index]]} for index in members]).parts
