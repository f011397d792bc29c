"""Packs the sequences of one batch into token rows that store every shared prefix once, with numpy.

`pack_unpadded` writes one token row without padding, for devices that accept any shape. `pad` writes one token row per
sequence. `pack` writes token rows of a few planned shapes, for devices that compile once per shape.

The sequences of a token row form a prefix tree. The tree is written depth first, with the sequences in lexicographic
order: each sequence adds only the tokens that it does not share with its predecessor. A pair becomes ``prefix | first
tail | second tail``. Data rows with the same prompt, or only the same system prompt, share its tokens too. A data row
may also have more than two answers. A position id is the depth in the tree, equal to the token's index in its own
sequence. One integer per token defines attention: the tokens that continue the text of the token in column k end at
column ``subtree_end[k]``, and the token in column q attends to the token in column k exactly when ``k <= q <
subtree_end[k]``. This also isolates unrelated data rows in the same token row.

Token rows and devices: with R token rows per micro-batch on N shards, token row r belongs to shard ``r // (R / N)``.
All tokens of a data row are in one token row, and any token row may hold any data row: `token_row_S` and
`token_column_S` locate the rewards, in the order of the batch. All token rows of a micro-batch have the same length,
and devices compute padding too, so all devices have equal work. Every host places all data rows of the
batch, in the same token rows, since sequences may share prefixes. It writes only its own part of the token rows. If
each process has one device, it writes the token rows of its device.

Letters: P data rows, K answers per data row, S = P K scored positions, D sequences (the sequences of a data
row are adjacent), G prefix trees, R token rows, L columns per token row, T tokens.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import UserError
from .batch import Batch, Comparisons, Expansion, Segments, Tail, Tree
from .read_order import columns_of, read_order
from .shapes import BatchShape, Schedule, ShapePlan, common_prefix, round_up, zigzag


@dataclass(frozen=True)
class Sequences:
    """A batch before packing or padding: its sequences, its scored tokens, and the comparisons of their rewards.

    Args:
        ids: Token ids of each sequence; sequences of one data row are adjacent. A solution is one sequence.
        at: Indices of each sequence's scored tokens, ascending; at least one.
        row_D: Number of each sequence's data row.
        pad_token_id: Token id of padding.
        table: Comparisons of the rewards of P data rows, with at most K scored tokens per data row.
        chunk: Lengths of sequences and of shared prefixes are multiples of this many tokens.
    """

    ids: list[np.ndarray]
    at: list[np.ndarray]
    row_D: np.ndarray
    pad_token_id: int
    table: Comparisons[np.ndarray]
    chunk: int = 1

    @cached_property
    def tokens(self) -> list[np.ndarray]:
        """The number of tokens from the previous reward to each reward, for each sequence.

        The last reward's number also includes the tokens after its scored token.
        """
        tokens_D = [at + 1 for at in self.at]
        for ids, tokens in zip(self.ids, tokens_D, strict=True):
            tokens[-1:] = len(ids)
            tokens[1:] -= tokens[:-1].copy()
        return tokens_D

    @cached_property
    def cut(self) -> list[np.ndarray]:
        """Token ids up to the last scored token of each sequence: later tokens cannot influence a reward."""
        cut = [ids[: at[-1] + 1] for ids, at in zip(self.ids, self.at, strict=True)]
        if self.chunk == 1:
            return cut
        return [np.pad(ids, (0, -len(ids) % self.chunk), constant_values=self.pad_token_id) for ids in cut]

    @cached_property
    def prefixes(self) -> tuple[np.ndarray, np.ndarray]:
        """Lexicographic order, and each sequence's common prefix with the one before it, in whole chunks, [D] each."""
        order, shared = in_order(self.cut)
        return order, np.array([0, *shared // self.chunk * self.chunk])

    def written(self, token_row_D: np.ndarray, tree_D: np.ndarray, shape: BatchShape) -> Batch[np.ndarray]:
        """Write sequences into token rows of ``shape``, depth first, tree after tree.

        Args:
            token_row_D: Token row that each sequence is written to; -1 leaves the sequence out.
            tree_D: Number of each sequence's tree, ascending from token row to token row.
            shape: Number and length of the token rows.
        """
        order = self.prefixes[0]
        order = order[token_row_D[order] >= 0]
        order = order[np.argsort(tree_D[order], kind="stable")].tolist()
        columns = np.arange(max(shape.length, max(map(len, self.cut))), dtype=np.int32)
        input_ids_RL = np.full((shape.rows, shape.length), self.pad_token_id, np.int32)
        position_ids_RL = np.zeros_like(input_ids_RL)
        subtree_end_RL = np.tile(columns[: shape.length] + 1, (shape.rows, 1))
        scores_3S, slots = np.zeros((3, len(self.table.grade_SA)), np.int32), self.slots()

        path = np.zeros_like(columns)  # column of the current sequence's token at each depth
        trees, tails = list[tuple[int, list[Tail]]](), list[Tail]()  # start and tails of each tree
        used_R, first = [0] * shape.rows, 0
        for before, index in pairwise([-1, *order]):
            token_row, ids, at = int(token_row_D[index]), self.cut[index], self.at[index]
            start, depth = used_R[token_row], 0
            if before < 0 or tree_D[index] != tree_D[before]:
                first, tails = start, []
                trees.append((token_row * shape.length + first, tails))
            else:
                depth = common_prefix(self.cut[before], ids) // self.chunk * self.chunk
            stop = used_R[token_row] = start + len(ids) - depth
            input_ids_RL[token_row, start:stop] = ids[depth:]
            position_ids_RL[token_row, start:stop] = columns[depth : len(ids)]
            if depth and path[depth - 1] == start - 1:  # the previous sequence is a prefix: extend its tail
                tails[-1] = replace(tails[-1], stop=stop - first)
            else:
                tails.append(Tail(start - first, stop - first, _ranges(path[:depth] - first)))
            path[depth : len(ids)] = columns[start:stop]
            subtree_end_RL[token_row, path[: len(ids)]] = stop  # later sequences with these tokens move it
            scores_3S[:, slots[index]] = np.full_like(at, token_row), path[at], self.tokens[index]

        whole = tuple(Tree(first, first + tails[-1].stop, tuple(tails)) for first, tails in trees)
        of_tokens = {"position_ids_RL": position_ids_RL, "subtree_end_RL": subtree_end_RL}
        return self.batch_of(input_ids_RL, scores_3S, **of_tokens, trees=whole)

    def batch_of(self, input_ids_RL: np.ndarray, scores_3S: np.ndarray, **layout: Any) -> Batch[np.ndarray]:
        """Return a batch of these token rows, with the comparisons of the rewards that are read in them.

        Args:
            input_ids_RL: Token ids.
            scores_3S: Token row, column and number of tokens of each reward; 0 tokens if it is in other token rows.
            **layout: Other fields of the batch.
        """
        token_row_S, column_S, tokens_S = scores_3S
        table = self.table.among(tokens_S.reshape(-1, self.table.answers).any(-1))
        return Batch(input_ids_RL, token_row_S, column_S, tokens_S, table, pad_token_id=self.pad_token_id, **layout)

    def slots(self) -> list[slice]:
        """Return the range of each sequence's rewards in arrays over S."""
        count_D = np.array(list(map(len, self.at)))
        before_D = np.cumsum(count_D) - count_D
        first_D = self.row_D * self.table.answers + before_D - before_D[np.searchsorted(self.row_D, self.row_D)]
        return [slice(first, first + count) for first, count in zip(first_D.tolist(), count_D.tolist(), strict=True)]


class TreeLayout(NamedTuple):
    """How models read the trees of unpadded batches.

    Attributes:
        attention: How trees attend: one after another; all tails in one call; or in token rows of trees with one mask.
            The first takes the least work, the others the fewest operations.
        is_recurrent: Whether the model has recurrent layers.
    """

    attention: Literal["one by one", "segments", "rows"] = "one by one"
    is_recurrent: bool = False


TREE_BY_TREE = TreeLayout()

_MAX_MASK = 2**27  # entries; with longer trees, even tree by tree, kernels are large and few


def pack_unpadded(
    sequences: Sequences, attention_crossover_length: float = 4096, layout: TreeLayout = TREE_BY_TREE
) -> list[Batch[np.ndarray]]:
    """Pack one batch into one token row without padding, tree after tree, or into rows as long as its largest tree.

    Sequences that are adjacent in lexicographic order share a tree if sharing saves more than attention over the
    larger tree costs.

    Args:
        sequences: At least one sequence.
        attention_crossover_length: The length at which attention costs as much as everything else.
        layout: How the trees are read: in one token row, or in token rows as long as the largest tree.
    """

    def work(size: int) -> float:
        return size * (1 + size / attention_crossover_length)

    order, shared_D = sequences.prefixes
    tree_D = np.zeros(len(order), np.int64)
    sizes = list[int]()  # of trees
    for index, shared in zip(order.tolist(), shared_D.tolist(), strict=True):
        added = len(sequences.cut[index])
        merged = sizes[-1] + added - shared if sizes else 0
        if sizes and work(merged) < work(sizes[-1]) + work(added):
            sizes[-1] = merged
        else:
            sizes.append(added)
        tree_D[index] = len(sizes) - 1
    rows = _rows_of_trees(sizes) if layout.attention == "rows" else None
    shape, token_row_G = rows or (BatchShape(1, sum(sizes)), np.zeros(len(sizes), np.int64))
    rank_G = np.argsort(np.argsort(token_row_G, kind="stable"))  # trees of a token row are adjacent
    written = sequences.written(token_row_G[tree_D], rank_G[tree_D], shape)
    trees, columns, few_groups = written.trees or (), written.input_ids_RL.size, layout.attention != "one by one"
    in_order = read_order(trees, columns, few_groups) if layout.is_recurrent else None
    segments = segments_of(trees) if layout.attention == "segments" else None
    return [replace(written, trees=None if rows else trees, segments=segments, read_order=in_order)]


def _rows_of_trees(sizes: list[int]) -> tuple[BatchShape, np.ndarray] | None:
    """Place each tree in the first token row with room; token rows are as long as the largest tree.

    Returns:
        Number and length of the token rows, and each tree's token row [G]. None if their mask is too large.
    """
    longest = round_up(max(sizes), 8)  # attention kernels copy masks of other lengths
    free_R, token_row_G = np.full(len(sizes), longest), np.empty(len(sizes), np.int64)
    for tree in np.argsort(sizes, kind="stable")[::-1].tolist():
        token_row_G[tree] = token_row = np.argmax(free_R >= sizes[tree])
        free_R[token_row] -= sizes[tree]
    rows = int(token_row_G.max()) + 1
    return (BatchShape(rows, longest), token_row_G) if rows * longest**2 <= _MAX_MASK else None


def segments_of(trees: tuple[Tree, ...]) -> Segments[np.ndarray]:
    """Return the segments of a row's trees."""
    tails = [(tree, tail) for tree in trees for tail in tree.tails]
    keys, queries = [columns_of(tree, tail) for tree, tail in tails], [tail.stop - tail.start for _, tail in tails]
    counts = list(map(len, keys))
    key_starts, query_starts = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (counts, queries))
    return Segments(np.concatenate(keys, dtype=np.int32), query_starts, key_starts, max(queries), max(counts))


def pad(sequences: Sequences, lengths: tuple[int, ...] | None = None, multiple: int = 1) -> list[Batch[np.ndarray]]:
    """Write each whole sequence into a separate token row, padded on the right.

    Args:
        sequences: At least one sequence.
        lengths: Planned lengths, ascending. The shortest sufficient length is used; if all are too short, the longest
            sequence's. The number of token rows is always the maximum for P data rows. None uses the longest
            sequence's length and one token row per sequence.
        multiple: Lengths that are not planned are rounded up to a multiple of this.
    """
    count, longest = len(sequences.ids), max(map(len, sequences.ids))
    length = next((planned for planned in lengths or () if planned >= longest), round_up(longest, multiple))
    table, has_several = sequences.table, sequences.row_D[-1] + 1 < count  # the steps of a solution are one sequence
    token_rows = count if lengths is None else len(table.grade_SA if has_several else table.row_weight_P)
    input_ids_RL = np.full((token_rows, length), sequences.pad_token_id, np.int32)
    mask_RL = np.zeros((token_rows, length), np.int32)
    mask_RL[:, 0] = 1  # attention in token rows without a token could give NaN
    scores_3S = np.zeros((3, len(table.grade_SA)), np.int32)
    for token_row, (ids, at, slots) in enumerate(zip(sequences.ids, sequences.at, sequences.slots(), strict=True)):
        input_ids_RL[token_row, : len(ids)], mask_RL[token_row, : len(ids)] = ids, 1
        scores_3S[:, slots] = np.full_like(at, token_row), at, sequences.tokens[token_row]
    return [sequences.batch_of(input_ids_RL, scores_3S, attention_mask_RL=mask_RL)]


def _ranges(columns: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return ascending columns as ranges of consecutive columns."""
    parts = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1) if len(columns) else []
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)


def last_scored(ids: np.ndarray, pad_token_id: int) -> int:
    """Return the index at which transformers reads a reward: of the last token that is not the pad token, or 0."""
    unpadded = np.flatnonzero(ids != pad_token_id)
    return int(unpadded[-1]) if len(unpadded) else 0


def in_order(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences' lexicographic order [D], and the common prefix lengths of neighbors in it [D - 1]."""
    as_bytes = [ids.astype(">u4").tobytes() for ids in sequences]  # big-endian bytes sort like the ids
    order = np.array(sorted(range(len(sequences)), key=as_bytes.__getitem__))
    shared = [common_prefix(sequences[left], sequences[right]) for left, right in pairwise(order)]
    return order, np.array(shared, np.int64)


# ---- planned shapes

# A shared token saves work for certain; a tighter fit only may save work for later data rows. So sharing weighs more.
_SHARING_WEIGHT = 4


def pack(
    sequences: Sequences, plan: ShapePlan, expands: bool = False, part: tuple[int, int] = (0, 1)
) -> list[Batch[np.ndarray]]:
    """Pack one batch by the cheapest schedule of ``plan`` that it fits into.

    Args:
        sequences: At least one sequence.
        plan: Shapes from `ShapePlanner`.
        expands: Whether attention reads rows of whole sequences. The batch then gets an `expansion`, and pairs share a
            token row only if all their chosen sequences together fit into its length, and all rejected sequences too.
        part: (index, count): write only the index-th of count equal parts of each micro-batch's token rows.

    Returns:
        The micro-batches in order. The last one ends the batch with an update.

    Raises:
        UserError: If a data row is longer than the longest token row, or the batch fits no shape.
    """
    sequences = replace(sequences, chunk=plan.chunk)
    schedule, token_row_P = _choose(sequences, plan, expands)
    (index, count), micro_batches, before = part, list[Batch[np.ndarray]](), 0
    for shape in schedule:
        part_shape = BatchShape(shape.rows // count, shape.length)
        token_row_D = token_row_P[sequences.row_D] - before - index * part_shape.rows
        token_row_D[token_row_D >= part_shape.rows] = -1
        written = sequences.written(token_row_D, token_row_D, part_shape)  # one tree per token row
        micro_batches.append(replace(written, trees=None, expansion=expand_rows(written) if expands else None))
        before += shape.rows
    return micro_batches


def _choose(sequences: Sequences, plan: ShapePlan, expands: bool) -> tuple[Schedule, np.ndarray]:
    """Return the cheapest schedule that the batch fits into, and the token row of each data row [P]."""
    row_D, (order, shared_D) = sequences.row_D, sequences.prefixes
    lengths_D = np.array(list(map(len, sequences.cut)))
    tries = Tries(lengths_D[order], shared_D)
    # ranks of each data row's sequences, and data rows in the lexicographic order of their first sequences
    first_P = np.searchsorted(row_D, np.arange(row_D[-1] + 1))
    ranks_P = [sorted(ranks.tolist()) for ranks in np.split(np.argsort(order), first_P[1:])]
    order_P = np.argsort([ranks[0] for ranks in ranks_P])
    sizes_P = np.array([tries.added(ranks, []) for ranks in ranks_P])  # tokens of each data row's prefix tree
    lengths_P2 = lengths_D.reshape(-1, 2)[order_P] if expands else None
    token_row_P = np.empty(len(sizes_P), np.int64)
    for schedule in plan.schedules() if sizes_P.max() <= plan.longest else ():  # with `accumulate`, they never end
        lengths_R = np.array([shape.length for shape in schedule for _ in range(shape.rows)])
        if lengths_R.sum() < lengths_D.sum() - shared_D.sum() or lengths_R.max() < sizes_P.max():
            continue
        placed = _place(sizes_P[order_P], [ranks_P[row] for row in order_P], tries, lengths_P2, lengths_R)
        if placed is not None:
            token_row_P[order_P] = placed
            return schedule, token_row_P
    # Best fit can fail even if the last shape is large enough. `zigzag` cannot fail: the shape was planned with it.
    last = plan.update[-1]
    token_row_P[np.argsort(-sizes_P, kind="stable")] = zigzag(len(sizes_P), last.rows)
    of_all = tries.of_all  # a token row holds it once
    if np.bincount(token_row_P, sizes_P - of_all).max() + of_all > last.length:
        size, largest = sizes_P.sum(), sizes_P.max()
        raise UserError(
            f"{len(sizes_P)} rows of {size} tokens, the largest of {largest}, fit no planned shape: {plan}."
        )
    return (last,), token_row_P


class Tries:
    """Sizes of prefix trees of any sequences, which are known by their ranks in lexicographic order.

    Attributes:
        of_all: Number of tokens that all sequences share.
    """

    def __init__(self, length_D: np.ndarray, shared_D: np.ndarray) -> None:
        """Build it from the sequences' lengths, and their common prefixes with the one before, by rank."""
        self._length_D, self.of_all = length_D.tolist(), int(shared_D[1:].min(initial=length_D.min()))
        levels, width = [shared_D[1:]], 1  # the common prefix of 1, 2, 4, ... neighbors and the sequence before them
        while len(levels[-1]) > width:
            levels.append(np.minimum(levels[-1][:-width], levels[-1][width:]))
            width *= 2
        self._levels = [level.tolist() for level in levels]

    def common_prefix(self, low: int, high: int) -> int:
        """Return the length of the common prefix of two sequences, of which ``low`` has the lower rank."""
        power = (high - low).bit_length() - 1
        level = self._levels[power]
        return min(level[low], level[high - (1 << power)])

    def added(self, ranks: list[int], held: list[int]) -> int:
        """Return how many tokens sequences add to the tree of the sequences that are held; both are ascending."""
        total, before = 0, -1
        for rank in ranks:
            at = bisect_left(held, rank)
            nearest = max(before, held[at - 1] if at else -1)
            shared = self.common_prefix(nearest, rank) if nearest >= 0 else 0
            if at < len(held):
                shared = max(shared, self.common_prefix(rank, held[at]))
            total, before = total + self._length_D[rank] - shared, rank
        return total


#: Token rows that hold a prefix, with their free tokens before them, ascending.
_Holders = list[tuple[int, int]]


def _lists_by_prefix(shared_P: np.ndarray, of_all: int, every_token_row: _Holders) -> list[list[tuple[int, _Holders]]]:
    """Return for each data row the lengths of some of its prefixes, each with a list of the token rows that hold it.

    Data rows with the same prefix have the same list. The lengths about double, so there are few.

    Args:
        shared_P: Number of tokens that each data row shares with the next one.
        of_all: Number of tokens that all data rows share.
        every_token_row: The list for these tokens. The others are empty.
    """
    lists_P: list[list[tuple[int, _Holders]]] = [[(of_all, every_token_row)] for _ in shared_P]
    least = 1
    while (shared_P >= of_all + least).any():
        first_N = np.flatnonzero(np.append(True, shared_P[:-1] < of_all + least))
        size_N = np.diff(first_N, append=len(shared_P))
        for first, size in zip(first_N[size_N > 1].tolist(), size_N[size_N > 1].tolist(), strict=True):
            common = int(shared_P[first : first + size - 1].min())
            if common < of_all + 2 * least:  # else the next round finds this prefix
                holders: _Holders = []
                for data_row in range(first, first + size):
                    lists_P[data_row].append((common, holders))
        least *= 2
    return lists_P


def _place(
    sizes_P: np.ndarray, ranks_P: list[list[int]], tries: Tries, lengths_P2: np.ndarray | None, lengths_R: np.ndarray
) -> list[int] | None:
    """Place data rows by best fit, largest first, and return the token row of each; None if they do not fit.

    A run of data rows that each share at least half of their tokens with a neighbor is placed together. A data row
    may go to the token rows of its sequences' neighbors, and to the fullest with room among those that hold a prefix
    of its first sequence.

    Args:
        sizes_P: Size of each data row. They are in the lexicographic order of their first sequences.
        ranks_P: Ranks of each data row's sequences, ascending.
        tries: The sizes of prefix trees.
        lengths_P2: Lengths of both sequences of each pair, if they also need unshared room in expanded rows.
        lengths_R: Length of each token row.
    """
    of_all = tries.of_all
    shared_P = np.array([*(tries.common_prefix(low[0], high[0]) for low, high in pairwise(ranks_P)), 0])
    is_first_P = np.append(True, 2 * shared_P[:-1] < np.minimum(sizes_P[1:], sizes_P[:-1]))
    run_P, longest_P = np.cumsum(is_first_P), np.maximum.reduceat(sizes_P, np.flatnonzero(is_first_P))
    order = np.lexsort((-sizes_P, run_P, -longest_P[run_P - 1])).tolist()
    # free tokens besides those that all sequences share
    sizes, free, free_R2 = sizes_P.tolist(), (lengths_R - of_all).tolist(), np.repeat(lengths_R[:, None], 2, axis=1)
    # outdated numbers in these lists are too large
    prefixes_P = _lists_by_prefix(shared_P, of_all, sorted((room, token_row) for token_row, room in enumerate(free)))

    def has_room(data_row: int, token_row: int) -> bool:
        return lengths_P2 is None or bool((lengths_P2[data_row] <= free_R2[token_row]).all())

    held_R, placed = [list[int]() for _ in free], list[tuple[int, int]]()  # ranks, and ranks with their token rows
    token_row_P = [-1] * len(sizes)
    for data_row in order:
        ranks, near = ranks_P[data_row], set[int]()
        for rank in ranks:
            at = bisect_left(placed, (rank,))
            near.update(token_row for _, token_row in placed[max(at - 1, 0) : at + 1])
        for common, holders in prefixes_P[data_row]:
            added = sizes[data_row] - common
            at = bisect_left(holders, (added, -1))
            while at < len(holders):
                room, token_row = holders[at]
                if room != free[token_row]:  # the token row got data rows without this prefix
                    del holders[at]
                    insort(holders, (free[token_row], token_row))
                    at = bisect_left(holders, (added, -1))
                elif not has_room(data_row, token_row):
                    at += 1
                else:
                    near.add(token_row)
                    break
        options = list[tuple[int, int, int]]()
        for token_row in near:
            added = tries.added(ranks, held_R[token_row]) - (0 if held_R[token_row] else of_all)
            if added <= free[token_row] and has_room(data_row, token_row):
                options.append((free[token_row] + _SHARING_WEIGHT * added, token_row, added))
        if not options:
            return None
        _, token_row, added = min(options)
        free[token_row] -= added
        for _, holders in prefixes_P[data_row]:
            insort(holders, (free[token_row], token_row))
        for rank in ranks:
            insort(held_R[token_row], rank)
            insort(placed, (rank, token_row))
        if lengths_P2 is not None:
            free_R2[token_row] -= lengths_P2[data_row]
        token_row_P[data_row] = token_row
    return token_row_P


def expand_rows(packed: Batch[np.ndarray]) -> Expansion[np.ndarray]:
    """Map the tokens of packed rows to expanded rows with contiguous sequences.

    Each packed row has two expanded rows, one for its chosen and one for its rejected sequences. In an expanded row,
    two tokens of a sequence are as many columns apart as in the sequence. Sliding windows need that.

    Raises:
        UserError: If the chosen or the rejected sequences of a packed row are together longer than it. This can happen
            only if pairs share tokens with other pairs: either sequence of a pair fits into the pair's own tokens.
    """
    assert packed.subtree_end_RL is not None  # packed rows have it
    token_rows, length = packed.subtree_end_RL.shape
    here_P = packed.tokens_S.reshape(-1, 2)[:, 0] > 0
    half_D = (packed.token_row_S.reshape(-1, 2)[here_P] * 2 + [0, 1]).T.ravel()
    order = np.argsort(half_D, kind="stable")
    half_D, last_D = half_D[order], packed.token_column_S.reshape(-1, 2)[here_P].T.ravel()[order]

    sees_DL = packed.subtree_end_RL[half_D // 2] > last_D[:, None]
    sees_DL &= np.arange(length) <= last_D[:, None]
    sequence_T, column_T = np.nonzero(sees_DL)
    longest = np.bincount(half_D[sequence_T], minlength=2 * token_rows).max()
    if longest > length:
        raise UserError(f"Chosen or rejected sequences of a packed row have {longest} tokens, more than its {length}.")

    # index of each token in the flattened expanded rows, and in the flattened packed rows
    # first token in the sequence's expanded row
    first_D = np.searchsorted(sequence_T, np.searchsorted(half_D, half_D))
    place_T = (half_D * length - first_D)[sequence_T] + np.arange(len(sequence_T))
    token_T = (half_D // 2 * length)[sequence_T] + column_T
    gather = np.full(2 * token_rows * length, -1, np.int32)
    scatter, segment, inverse = gather.copy(), np.zeros_like(gather), np.full(token_rows * length, -1, np.int32)
    gather[place_T] = column_T
    segment[place_T] = sequence_T + 1
    inverse[token_T] = place_T  # of several copies, the last one gives the output
    token_M = np.flatnonzero(inverse >= 0)
    scatter[inverse[token_M]] = token_M % length
    inverse[token_M] -= (token_M // length * 2 * length).astype(np.int32)
    gather, segment, scatter = (index.reshape(token_rows, 2, length) for index in (gather, segment, scatter))
    return Expansion(gather, segment, scatter, inverse.reshape(token_rows, length))
