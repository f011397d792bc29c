"""Puts dialogues that are only to be scored into padded rows, those of one length together. numpy only.

Letters: R rows, L length of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .shapes import doubled_to

_SHORTEST_ROW = 64


@dataclass(frozen=True)
class PaddedPass:
    """Dialogues that are computed at a time, each in a row of its own.

    Args:
        members: Which ones, of those that were given; a pass may have more rows.
        input_ids_RL: Token ids, int64; padded on the right.
        lengths_R: The tokens of each row; 1 of those that hold no dialogue.
    """

    members: list[int]
    input_ids_RL: np.ndarray
    lengths_R: np.ndarray


@dataclass(frozen=True)
class PaddedPasses:
    """Makes passes of padded rows, for models of which packed rows are not exact.

    Args:
        pad_token_id: Fills what rows have left.
        tokens: Columns of a pass on each shard, unless one row is longer.
        shards: Over how many devices rows are split.
        is_static: Whether there may only be few shapes: lengths that double.
        most: Most dialogues of a pass on each shard; no limit when None.
    """

    pad_token_id: int
    tokens: int
    shards: int = 1
    is_static: bool = False
    most: int | None = None

    def __call__(self, dialogues: Sequence[np.ndarray], alone: bool = False) -> Iterator[PaddedPass]:
        """Yield passes that hold each dialogue once, in order of their lengths."""
        by_length = sorted(range(len(dialogues)), key=lambda index: len(dialogues[index]))
        while by_length:
            length = self._length(len(dialogues[by_length[-1]]))
            rows = self.shards * max(1, min(self.tokens // length, self.most or self.tokens))
            members = by_length[-rows:]
            if self.is_static:  # shorter ones have a shape of their own
                members = [index for index in members if self._length(len(dialogues[index])) == length]
            del by_length[-len(members) :]
            input_ids_RL = np.full((rows if self.is_static else len(members), length), self.pad_token_id, np.int64)
            lengths_R = np.ones(len(input_ids_RL), np.int64)
            for row, index in enumerate(members):
                input_ids_RL[row, : len(dialogues[index])] = dialogues[index]
                lengths_R[row] = len(dialogues[index])
            yield PaddedPass(members, input_ids_RL, lengths_R)

    def _length(self, longest: int) -> int:
        return doubled_to(_SHORTEST_ROW, longest) if self.is_static else longest
