"""Packs many dialogues that are only to be scored: what they share once, as many as are worth it in one tree.

Unlike a training batch nothing belongs together here, so any dialogues may be computed at a time: a pass. In
lexicographic order those that share most are neighbors: the answers to a prompt, and prompts with the same beginning.

`TightPasses` makes rows without padding, for a device that takes any shape. `PlannedPasses` makes rows of a few
lengths, each with as many columns as the others together, for a device that compiles each. numpy only.

Letters: D dialogues of a pass, R rows, L length of a row.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .pack import up_to_scored
from .rows import DialogueRows
from .shapes import RowShape, doubled_to
from .trie import Group, grow_groups, in_order, joins_where_cheaper, lay_out

_SHORTEST_ROW = 128
_TOKENS_A_DIALOGUE = 16  # a planned row has a place for one dialogue in so many columns
_SHARED_PART = 1 / 8  # of a dialogue: what it must share with a tree, to join it in a planned row
_PROGRAM_WORK = 2**16  # tokens that could be computed while one more program is compiled


@dataclass(frozen=True)
class Pass:
    """Dialogues that are computed at a time.

    Args:
        members: Which ones, of those that were given; a pass may have places for more.
        rows: What holds them, in this order.
    """

    members: list[int]
    rows: DialogueRows[np.ndarray]


@dataclass(frozen=True)
class TightPasses:
    """Makes passes of one row without padding.

    Args:
        pad_token_id: Texts end before it.
        tokens: Most tokens of a pass, unless one tree is larger.
        attention_crossover_length: The length at which attention costs as much as everything else.
        most: Most dialogues of a pass; no limit when None.
    """

    pad_token_id: int
    tokens: int
    attention_crossover_length: float
    most: int | None = None

    def __call__(self, dialogues: Sequence[np.ndarray], alone: bool = False) -> Iterator[Pass]:
        """Yield passes that hold each dialogue once; with ``alone`` each is a tree of its own."""
        ends = [up_to_scored(ids, self.pad_token_id) for ids in dialogues]
        # trees of one size side by side: dialogues of one length then attend as rows of one batch
        groups = sorted(self._groups(ends, alone), key=lambda group: (group.size, group.members[0]))
        for some in self._in_turn(groups):
            shape = RowShape(1, sum(group.size for group in some))
            yield _written(ends, [[group] for group in some], shape, self.pad_token_id, is_tight=True)

    def _groups(self, ends: list[np.ndarray], alone: bool) -> list[Group]:
        is_cheaper = joins_where_cheaper(self.attention_crossover_length)

        def joins(group: Group, length: int, shared: int) -> bool:
            fits = group.size + length - shared <= max(self.tokens, 2 * length)
            return not alone and fits and self._has_room(len(group.members)) and is_cheaper(group, length, shared)

        return _grouped(ends, joins)

    def _has_room(self, count: int) -> bool:
        return self.most is None or count < self.most

    def _in_turn(self, groups: Iterable[Group]) -> Iterator[list[Group]]:
        some: list[Group] = []
        for group in groups:
            tokens = sum(each.size for each in some) + group.size
            count = sum(len(each.members) for each in some) + len(group.members)
            if some and (tokens > self.tokens or not self._has_room(count - 1)):
                yield some
                some = []
            some.append(group)
        if some:
            yield some


@dataclass
class PlannedPasses:
    """Makes passes of rows whose lengths are `length` and, for dialogues that are longer, its doubles.

    Args:
        pad_token_id: Texts end before it, and it fills what rows have left.
        tokens: Columns of a pass on each shard, unless one row is longer.
        attention_crossover_length: The length at which attention costs as much as everything else.
        shards: Over how many devices rows are split.
        length: Of the usual rows; chosen for the first dialogues that come when None.
    """

    pad_token_id: int
    tokens: int
    attention_crossover_length: float
    shards: int = 1
    length: int | None = field(default=None)

    def __call__(self, dialogues: Sequence[np.ndarray], alone: bool = False) -> Iterator[Pass]:
        """Yield passes that hold each dialogue once; with ``alone`` each has a row of its own."""
        ends = [up_to_scored(ids, self.pad_token_id) for ids in dialogues]
        if self.length is None and ends:
            self.length = self._best_length(ends)
        for length, rows in sorted(self._rows(ends, self.length or _SHORTEST_ROW, alone).items()):
            shape = self.shape(length)
            for first in range(0, len(rows), shape.rows):
                yield _written(ends, rows[first : first + shape.rows], shape, self.pad_token_id)

    def shape(self, length: int) -> RowShape:
        """Return the rows of a pass whose rows have a length."""
        return RowShape(self.shards * max(1, self.tokens // length), length)

    def _best_length(self, ends: list[np.ndarray]) -> int:
        """Choose the length by which these dialogues cost least."""
        longest = max(map(len, ends))
        lengths = [_SHORTEST_ROW]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])

        def work(length: int) -> float:
            total = 0.0
            for each, rows in self._rows(ends, length, alone=False).items():
                shape = self.shape(each)
                passes = -(-len(rows) // shape.rows)
                total += passes * shape.work(self.attention_crossover_length) + _PROGRAM_WORK * self.shards
            return total

        return min(lengths, key=work)

    def _rows(self, ends: list[np.ndarray], shortest: int, alone: bool) -> dict[int, list[list[Group]]]:
        """Return the trees of each row, by the rows' length."""
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(ends):
            by_length.setdefault(doubled_to(shortest, len(ids)), []).append(index)
        rows = {}
        for length, indices in by_length.items():
            most = 1 if alone else length // _TOKENS_A_DIALOGUE

            def joins(group: Group, own: int, shared: int, length: int = length, most: int = most) -> bool:
                fits = group.size + own - shared <= length and len(group.members) < most
                return fits and shared >= _SHARED_PART * own

            groups = _grouped([ends[index] for index in indices], joins)
            named = [Group([indices[member] for member in g.members], g.shared, g.size) for g in groups]
            rows[length] = _best_fit(named, length, most)
        return rows


def _grouped(ends: list[np.ndarray], joins: Callable[[Group, int, int], bool]) -> list[Group]:
    lengths_D = np.array([len(ids) for ids in ends])
    return grow_groups(*in_order(ends), lengths_D, joins) if ends else []


def _best_fit(groups: list[Group], length: int, most: int) -> list[list[Group]]:
    """Place trees, the largest first, into the fullest row that has room for them and their dialogues."""
    rows: list[list[Group]] = []
    free_R = np.full(len(groups), length)
    places_R = np.full(len(groups), most)
    for group in sorted(groups, key=lambda group: (-group.size, group.members[0])):
        open_ = slice(0, len(rows) + 1)
        left_R = free_R[open_] - group.size
        left_R[(left_R < 0) | (places_R[open_] < len(group.members))] = length + 1
        row = int(left_R.argmin())
        if row == len(rows):
            rows.append([])
        rows[row].append(group)
        free_R[row] -= group.size
        places_R[row] -= len(group.members)
    return rows


def _written(
    ends: list[np.ndarray], trees: list[list[Group]], shape: RowShape, pad_token_id: int, is_tight: bool = False
) -> Pass:
    """Write the groups of each tree, one after the other; a tight row has all trees, other rows have one each."""
    members = [index for tree in trees for group in tree for index in group.members]
    shared = [tokens for tree in trees for group in tree for tokens in group.shared]
    trees_D = np.repeat(np.arange(len(trees)), [sum(len(group.members) for group in tree) for tree in trees])
    row_of_tree = np.zeros(len(trees), int) if is_tight else np.arange(len(trees))
    layout = lay_out(
        [ends[index] for index in members],
        trees_D,
        row_of_tree,
        order=np.arange(len(members)),
        prefix_DD=np.diag(shared[1:], 1) if len(shared) > 1 else np.zeros((1, 1), int),
        shape=shape,
        pad_token_id=pad_token_id,
    )
    places = len(members) if is_tight else shape.rows * shape.length // _TOKENS_A_DIALOGUE
    missing = (0, places - len(members))
    rows = DialogueRows(
        layout.input_ids_RL,
        layout.position_ids_RL,
        layout.subtree_end_RL,
        last_row_D=np.pad(row_of_tree[trees_D].astype(np.int32), missing),
        last_column_D=np.pad(layout.last_column_D, missing),
        trees=layout.trees if is_tight else None,
    )
    return Pass(members, rows)
