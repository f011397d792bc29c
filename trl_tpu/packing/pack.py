"""Packs the sequences of one batch into rows that hold every shared prefix once. numpy only.

`pack` writes rows of a few planned shapes, for a device that compiles each; `pack_unpadded` writes one row without
padding, for a device that takes any shape; `pad` writes a row for each sequence.

The sequences of a row form a trie. Written depth first, with the sequences in lexicographic order, each sequence adds
the tokens that its predecessor does not share, so a pair becomes ``prefix | one tail | other tail``, and pairs that
share their prompt, or only a system prompt, share its tokens too. The same holds for prompts with more than two
answers. A position id is the depth in the trie, which is the token's index in its own sequence. One integer per token
says which tokens attend to it: ``subtree_end[k]`` is the column where the tokens that continue k's text end, and the
token in column q attends to the one in k exactly when ``k <= q < subtree_end[k]``. That also isolates pairs that only
share a row.

Rows and devices: of the R rows of a micro-batch on N shards, row r belongs to shard ``r // (R / N)``. A pair lies
whole in one row, and any row may hold any pair: `score_row_S` and `score_column_S` address all of them, in the batch's
own order. All rows of a micro-batch have the same length and a device computes all of it, so devices have equal work
whatever their rows hold. With several hosts each host packs the whole batch, which is deterministic, and keeps its own
slice of rows; of processes with a device each, every one writes the rows of its device, its part.

Letters: B batches, P pairs, K answers of each, S = P K scored positions, D sequences (those of a pair one after
another), R rows, L length of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .rows import Tail, TokenRows, Tree, expand_rows
from .shapes import RowPlan, RowShape, Schedule, round_up, zigzag

Rows = list[TokenRows[np.ndarray]]

# A token saved by sharing is saved for sure; a row filled more tightly only may save one later.
_TOKENS_PER_FREE_TOKEN = 4


class Scored(NamedTuple):
    """One row of the data: its sequences, and the tokens at which rewards are read."""

    sequences: list[np.ndarray]
    """Token ids of the answers, the chosen one first; of a solution with steps one sequence."""
    at: list[np.ndarray]
    """For each sequence the indices of its scored tokens, ascending."""

    @property
    def tokens(self) -> list[np.ndarray]:
        """For each sequence the tokens that each of its rewards adds to those before it.

        The last reward of a sequence adds the rest of it, even what follows its scored token.
        """
        pairs = zip(self.sequences, self.at, strict=True)
        return [np.diff([0, *(at[:-1] + 1), len(ids)])[: len(at)] for ids, at in pairs]


def pack(
    rows: Sequence[Scored],
    plan: RowPlan,
    most_pairs: int,
    pad_token_id: int,
    answers: int = 2,
    expands: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Rows:
    """Pack one batch by the cheapest schedule of ``plan`` that holds it.

    Args:
        rows: Of the data.
        plan: From `plan_rows`.
        most_pairs: P. A batch may have fewer, but not more.
        pad_token_id: Fills what rows have left.
        answers: K, the most scored tokens of a row of the data.
        expands: Whether attention reads rows of whole sequences: then the rows have their `expansion`, and pairs share
            a row only if their chosen sequences, one after the other, fit into its length, and the rejected ones too.
        part: Which rows of each micro-batch to write, the first having (0, count). The parts of all are its rows.

    Returns:
        The micro-batches in order; the last one updates.

    Raises:
        UserError: If a pair is longer than the longest row, there are too many, or the batch fits no shape.
    """
    batch = _Batch.cut(rows, most_pairs, pad_token_id, answers)
    schedule, row_P = _choose(batch, plan, expands)
    (index, count), micro_batches, before = part, Rows(), 0
    for shape in schedule:
        own = RowShape(shape.rows // count, shape.length)
        row_D = row_P[batch.pair_D] - before - index * own.rows
        row_D[row_D >= own.rows] = -1
        written = batch.written(row_D, row_D, own)  # one tree a row
        micro_batches.append(replace(written, trees=None, expansion=expand_rows(written) if expands else None))
        before += shape.rows
    return micro_batches


def pack_unpadded(
    rows: Sequence[Scored],
    pad_token_id: int,
    most_pairs: int | None = None,
    answers: int = 2,
    attention_crossover_length: float = 4096,
) -> Rows:
    """Pack one batch into a single row without padding, tree after tree.

    Attention can then be computed tree by tree. Neighbors in lexicographic order share a tree where sharing saves more
    than attention over the larger tree costs.

    Args:
        rows, pad_token_id, answers: As in `pack`.
        most_pairs: P; by default as many as there are.
        attention_crossover_length: The length at which attention costs as much as everything else.
    """

    def work(size: int) -> float:
        return size * (1 + size / attention_crossover_length)

    batch = _Batch.cut(rows, most_pairs or len(rows), pad_token_id, answers)
    tree_D = np.zeros(len(batch.ids), np.int64)
    tree, size, length, before = -1, 0, 0, 0
    for index in batch.order.tolist():
        added = len(batch.ids[index])
        together = size + added - int(batch.prefix_DD[before, index])
        if tree >= 0 and work(together) < work(size) + work(added):
            length, size = length + together - size, together
        else:
            length, size, tree = length + added, added, tree + 1
        tree_D[index], before = tree, index
    return [batch.written(np.zeros_like(tree_D), tree_D, RowShape(1, length))]


def pad(
    rows: Sequence[Scored],
    pad_token_id: int,
    most_pairs: int | None = None,
    answers: int = 2,
    lengths: tuple[int, ...] | None = None,
    multiple: int = 1,
) -> Rows:
    """Write each sequence into a row of its own, padded on the right.

    Args:
        rows, pad_token_id, answers: As in `pack`.
        most_pairs: P; by default as many as there are.
        lengths: Planned lengths, ascending: rows get the shortest that fits, else the longest sequence's, and there
            are always as many rows as P pairs can have. None keeps the number of sequences, too.
        multiple: Of lengths that are not planned.
    """
    ids, at = ([each for row in rows for each in row[field]] for field in (0, 1))
    longest, pairs = max(map(len, ids)), most_pairs or len(rows)
    length = next((each for each in lengths or () if each >= longest), round_up(longest, multiple))
    per_pair = answers if any(len(row.sequences) > 1 for row in rows) else 1  # the steps of a solution are one row
    shape = RowShape(len(ids) if lengths is None else pairs * per_pair, length)
    row_D, length_R = np.arange(len(ids)), np.ones(shape.rows, np.int32)  # rows without a token could become NaN
    length_R[: len(ids)] = list(map(len, ids))
    written = _Batch(rows, ids, at, (pairs, answers), row_D, np.empty(0), pad_token_id).written(row_D, row_D, shape)
    mask_RL = (np.arange(length) < length_R[:, None]).astype(np.int32)
    return [replace(written, attention_mask_RL=mask_RL, position_ids_RL=None, subtree_end_RL=None, trees=None)]


@dataclass(frozen=True)
class _Batch:
    """The sequences of a batch, those of a pair one after another, and what any two of them share."""

    rows: Sequence[Scored]
    ids: list[np.ndarray]
    """The token ids of each sequence that are written."""
    at: list[np.ndarray]
    """The indices of its scored tokens."""
    shape: tuple[int, int]
    """P and K."""
    order: np.ndarray
    prefix_DD: np.ndarray
    pad_token_id: int

    @classmethod
    def cut(cls, rows: Sequence[Scored], most_pairs: int, pad_token_id: int, answers: int) -> "_Batch":
        """Read sequences up to their last scored tokens: later tokens cannot influence a reward."""
        if len(rows) > most_pairs:  # numpy would leave the last ones out
            raise UserError(f"A batch has at most {most_pairs} pairs, as its shapes were planned; got {len(rows)}.")
        at = [each for row in rows for each in row.at]
        whole = [ids for row in rows for ids in row.sequences]
        ids = [each[: indices[-1] + 1] if len(indices) else each[:1] for each, indices in zip(whole, at, strict=True)]
        return cls(rows, ids, at, (most_pairs, answers), *common_prefixes(ids), pad_token_id)

    @property
    def pair_D(self) -> np.ndarray:
        """The pair of each sequence."""
        return np.repeat(np.arange(len(self.rows)), [len(row.sequences) for row in self.rows])

    def written(self, row_D: np.ndarray, tree_D: np.ndarray, shape: RowShape) -> TokenRows[np.ndarray]:
        """Write sequences into rows of ``shape``, depth first, tree after tree.

        Args:
            row_D: The row of each sequence; -1 leaves it out.
            tree_D: Its tree. Trees of one row have consecutive numbers, and rows ascend with them.
            shape: Of the rows.
        """
        columns = np.arange(max(shape.length, max(map(len, self.ids))), dtype=np.int32)
        input_ids_RL = np.full((shape.rows, shape.length), self.pad_token_id, np.int32)
        position_ids_RL = np.zeros((shape.rows, shape.length), np.int32)
        subtree_end_RL = np.tile(columns[: shape.length] + 1, (shape.rows, 1))
        scores_3S = np.zeros((3, self.shape[0] * self.shape[1]), np.int32)
        tokens, pair_D, count_D = [n for row in self.rows for n in row.tokens], self.pair_D, list(map(len, self.at))
        before_D = np.cumsum(count_D) - count_D
        slot_D = pair_D * self.shape[1] + before_D - before_D[np.searchsorted(pair_D, pair_D)]  # of first rewards

        path = np.zeros_like(columns)  # by depth, the column of the current sequence's token
        segments = list[tuple[int, int, int, int, int]]()  # row, columns and depths of what each sequence adds
        trees, tails = list[tuple[int, list[Tail]]](), list[Tail]()  # where each tree begins, and its tails
        before, first, stop = -1, 0, 0
        for index in self.order[np.argsort(tree_D[self.order], kind="stable")].tolist():
            row, ids, at = int(row_D[index]), self.ids[index], self.at[index]
            if row < 0:
                continue
            is_new = before < 0 or tree_D[index] != tree_D[before]
            if before < 0 or row != row_D[before]:
                stop = 0
            depth = 0 if is_new else int(self.prefix_DD[before, index])
            if is_new:
                first, tails = stop, []
                trees.append((first, tails))
            start, stop, before = stop, stop + len(ids) - depth, index
            input_ids_RL[row, start:stop] = ids[depth:]
            position_ids_RL[row, start:stop] = columns[depth : len(ids)]
            if depth and path[depth - 1] == start - 1:  # it goes on where the one before it ended
                tails[-1] = replace(tails[-1], stop=stop - first)
            else:
                tails.append(Tail(start - first, stop - first, _ranges(path[:depth] - first)))
            path[depth : len(ids)] = columns[start:stop]
            segments.append((row, start, stop, depth, len(ids)))
            slots = slice(slot_D[index], slot_D[index] + len(at))
            scores_3S[0, slots], scores_3S[1, slots], scores_3S[2, slots] = row, path[at], tokens[index]

        end, after = np.empty_like(columns), -1  # by depth, where the subtree of a token at that depth ends
        for row, start, stop, depth, size in reversed(segments):
            if row != after:
                end[:], after = stop, row
            subtree_end_RL[row, start:stop] = end[depth:size]
            end[depth:] = start
        row_S, column_S, tokens_S = scores_3S
        in_trees = position_ids_RL, subtree_end_RL
        whole = tuple(Tree(first, first + tails[-1].stop, tuple(tails)) for first, tails in trees)
        return TokenRows(input_ids_RL, row_S, column_S, tokens_S, *in_trees, trees=whole)


def _ranges(columns: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return ascending columns as ranges."""
    parts = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1) if len(columns) else []
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)


def last_scored(ids: np.ndarray, pad_token_id: int) -> int:
    """Return the index of the last token that is not the pad token, or 0: there transformers reads a reward."""
    others = np.flatnonzero(ids != pad_token_id)
    return int(others[-1]) if len(others) else 0


# ---- prefixes


def in_order(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences' lexicographic order [D], and how many first tokens neighbors in it share [D - 1]."""
    as_bytes = [ids.astype(">u4").tobytes() for ids in sequences]  # compared byte by byte, these sort as the ids do
    order = np.array(sorted(range(len(sequences)), key=as_bytes.__getitem__))
    shared = np.zeros(max(len(order) - 1, 0), np.int64)
    for rank, (one, other) in enumerate(zip(order, order[1:], strict=False)):
        length = min(len(sequences[one]), len(sequences[other]))
        differs = np.append(sequences[one][:length] != sequences[other][:length], True)
        shared[rank] = differs.argmax()  # the first difference
    return order, shared


def common_prefixes(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences' lexicographic order [D], and the length of the common prefix of any two [D, D].

    The common prefix of two is the shortest common prefix of neighbors between them in lexicographic order.
    """
    order, neighbors = in_order(sequences)
    by_rank_DD = np.diag([len(sequences[index]) for index in order])
    for rank in range(len(order) - 1):
        by_rank_DD[rank, rank + 1 :] = np.minimum.accumulate(neighbors[rank:])
    by_rank_DD = np.maximum(by_rank_DD, by_rank_DD.T)
    prefix_DD = np.empty_like(by_rank_DD)
    prefix_DD[np.ix_(order, order)] = by_rank_DD
    return order, prefix_DD


def _tree_sizes(batch: _Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the size of each pair's trie [P], and how many tokens the tries of any two pairs share [P, P]."""
    pair_D, order, prefix_DD = batch.pair_D, batch.order, batch.prefix_DD
    firsts_P = np.searchsorted(pair_D, np.arange(len(batch.rows)))
    by_pair_D = order[np.argsort(pair_D[order], kind="stable")]  # pair by pair, each in lexicographic order
    one_D, next_D = by_pair_D[:-1], by_pair_D[1:]
    common_D = np.where(pair_D[one_D] == pair_D[next_D], prefix_DD[one_D, next_D], 0)
    in_trie_DP = np.maximum.reduceat(prefix_DD, firsts_P, axis=1)[by_pair_D]  # first tokens that are in a trie
    before_DP = np.minimum(np.minimum(in_trie_DP[:-1], in_trie_DP[1:]), common_D[:, None])
    shared_PP = np.add.reduceat(in_trie_DP, firsts_P, axis=0)
    shared_PP -= np.add.reduceat(np.pad(before_DP, ((0, 1), (0, 0))), firsts_P, axis=0)
    return shared_PP.diagonal().copy(), shared_PP


# ---- where pairs go


def _choose(batch: _Batch, plan: RowPlan, expands: bool) -> tuple[Schedule, np.ndarray]:
    """Return the cheapest schedule that holds the batch, and each pair's row among all rows of it [P]."""
    sizes_P, shared_PP = _tree_sizes(batch)
    lengths_D = np.array(list(map(len, batch.ids)))
    lengths_P2 = lengths_D.reshape(-1, 2) if expands else None
    fewest = lengths_D.sum() - batch.prefix_DD[batch.order[:-1], batch.order[1:]].sum()  # in one trie
    if sizes_P.max() > plan.longest:
        pair = int(sizes_P.argmax())
        raise UserError(
            f"Pair {pair} of the batch takes {sizes_P[pair]} tokens (both sequences, their common prefix once), but "
            f"the longest planned row has {plan.longest}. Pairs are never cut: plan the shapes with this pair's size "
            "among them, or leave out long sequences with `max_length`."
        )
    for schedule in plan.schedules():
        lengths_R = np.array([shape.length for shape in schedule for _ in range(shape.rows)])
        if lengths_R.sum() < fewest or lengths_R.max() < sizes_P.max():
            continue
        row_P = _place(sizes_P, shared_PP, lengths_P2, lengths_R)
        if row_P is not None:
            return schedule, row_P
    # Best fit may fail by bad luck where `zigzag`, by which the last shape was made, cannot.
    last = plan.update[-1]
    row_P = np.empty(len(sizes_P), np.int64)
    row_P[np.argsort(-sizes_P, kind="stable")] = zigzag(len(sizes_P), last.rows)
    if np.bincount(row_P, sizes_P).max() > last.length:
        raise UserError(
            f"A batch of {len(sizes_P)} pairs with {sizes_P.sum()} tokens fits none of the planned shapes "
            f"{plan}. Plan the shapes with the sizes of these pairs among them."
        )
    return (last,), row_P


def _place(
    sizes_P: np.ndarray, shared_PP: np.ndarray, lengths_P2: np.ndarray | None, lengths_R: np.ndarray
) -> np.ndarray | None:
    """Place pairs by best fit, the largest first: return each pair's row [P], or None where they do not fit.

    A pair adds to a row its size less the most that it shares with any one pair in that row; the trie may save more,
    never less. With ``lengths_P2`` its two sequences need room too, where nothing is shared.
    """
    free_R = lengths_R.copy()
    free_R2 = np.repeat(lengths_R[:, None], 2, axis=1)
    shared_RP = np.zeros((len(lengths_R), len(sizes_P)), shared_PP.dtype)
    row_P = np.empty(len(sizes_P), np.int64)
    leader_P = np.where(2 * shared_PP >= sizes_P[:, None], sizes_P, 0).argmax(axis=1)
    for pair in np.lexsort((-sizes_P, leader_P, -sizes_P[leader_P])):
        added_R = sizes_P[pair] - shared_RP[:, pair]
        full_R = added_R > free_R
        if lengths_P2 is not None:
            full_R |= (lengths_P2[pair] > free_R2).any(axis=1)
        score_R = free_R + _TOKENS_PER_FREE_TOKEN * added_R
        score_R[full_R] = np.iinfo(np.int64).max
        row = score_R.argmin()
        if full_R[row]:
            return None
        row_P[pair] = row
        free_R[row] -= added_R[row]
        if lengths_P2 is not None:
            free_R2[row] -= lengths_P2[pair]
        np.maximum(shared_RP[row], shared_PP[pair], out=shared_RP[row])
    return row_P
