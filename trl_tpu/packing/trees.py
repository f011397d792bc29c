"""Prefix trees of the sequences of a row of the data, and their sizes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .shapes import RowShape


@dataclass(frozen=True)
class PairLengths:
    """Tokens of each pair's common prefix, and of its sequences' tails after it: of two, or of K ranked answers."""

    prefix_P: np.ndarray
    tails_PK: np.ndarray
    """0 for answers that a prompt does not have."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int, int]]) -> "PairLengths":
        """Return pairs of which each is given as the tokens of its prefix, its chosen and its rejected tail."""
        lengths_P3 = np.array(list(pairs), dtype=np.int64).reshape(-1, 3)
        return cls(lengths_P3[:, 0], lengths_P3[:, 1:])

    @classmethod
    def joined(cls, parts: Sequence["PairLengths"]) -> "PairLengths":
        """Return the pairs of all parts, one after another."""
        if not parts:
            return cls.of([])
        most = max(part.tails_PK.shape[1] for part in parts)
        tails = [np.pad(part.tails_PK, ((0, 0), (0, most - part.tails_PK.shape[1]))) for part in parts]
        return cls(np.concatenate([part.prefix_P for part in parts]), np.concatenate(tails))

    @classmethod
    def of_size(cls, size: int) -> "PairLengths":
        """Return one pair of ``size`` unique tokens: half of them prompt, a quarter in each answer."""
        answer = max(1, size // 4)
        return cls.of([(size - 2 * answer, answer, answer)])

    def __len__(self) -> int:
        return len(self.prefix_P)

    @property
    def sizes_P(self) -> np.ndarray:
        """Unique tokens of each pair: the prefix counts once."""
        return self.prefix_P + self.tails_PK.sum(axis=1)

    @property
    def longest_P(self) -> np.ndarray:
        """Tokens of the longest sequence of each pair."""
        return self.prefix_P + self.tails_PK.max(axis=1, initial=0)

    @property
    def tokens(self) -> int:
        """Unique tokens of all pairs."""
        return int(self.sizes_P.sum())

    def attended(self, window: int | None = None) -> int:
        """Count pairs of tokens of which one attends to the other: itself and those before it in its sequence.

        Args:
            window: How many tokens a token sees at most, itself among them.
        """
        shared_P = _seen(self.prefix_P, window)
        tails = (_seen(self.prefix_P + tail_P, window) - shared_P for tail_P in self.tails_PK.T)
        return int((shared_P + sum(tails)).sum())


def _seen(length_P: np.ndarray, window: int | None) -> np.ndarray:
    """Count what the tokens of a causal text of each length see, all together."""
    short_P = length_P if window is None else np.minimum(length_P, window)
    return short_P * (short_P + 1) // 2 + (length_P - short_P) * (window or 0)


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many first tokens two sequences share."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0  # which stops there
    return first if length and differs[first] else length


def in_order(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences' lexicographic order [D], and how many first tokens neighbors in it share [D - 1]."""
    as_bytes = [ids.astype(">u4").tobytes() for ids in sequences]  # compared byte by byte, these sort as the ids do
    order = np.array(sorted(range(len(sequences)), key=as_bytes.__getitem__))
    pairs = zip(order, order[1:], strict=False)
    return order, np.array([common_prefix(sequences[one], sequences[other]) for one, other in pairs], np.int64)


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


def tree_sizes(order: np.ndarray, prefix_DD: np.ndarray, firsts_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the size of each pair's trie [P], and how many tokens the tries of any two pairs share [P, P].

    Args:
        order, prefix_DD: From `common_prefixes`.
        firsts_P: The first sequence of each pair; the others follow it.
    """
    pair_D = np.searchsorted(firsts_P, np.arange(len(order)), side="right")
    by_pair_D = order[np.argsort(pair_D[order], kind="stable")]  # pair by pair, each in lexicographic order
    one_D, next_D = by_pair_D[:-1], by_pair_D[1:]
    common_D = np.where(pair_D[one_D] == pair_D[next_D], prefix_DD[one_D, next_D], 0)
    in_trie_DP = np.maximum.reduceat(prefix_DD, firsts_P, axis=1)[by_pair_D]  # first tokens that are in a trie
    before_DP = np.minimum(np.minimum(in_trie_DP[:-1], in_trie_DP[1:]), common_D[:, None])
    shared_PP = np.add.reduceat(in_trie_DP, firsts_P, axis=0)
    shared_PP -= np.add.reduceat(np.pad(before_DP, ((0, 1), (0, 0))), firsts_P, axis=0)
    return shared_PP.diagonal().copy(), shared_PP


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens that a sequence adds to its tree: they see their path, and one another in order."""

    start: int
    """Their first column, counted from the tree's."""
    stop: int
    path: tuple[tuple[int, int], ...]
    """The columns before them in their sequence, as ranges counted from the tree's first."""

    def after(self, depth: int) -> tuple[tuple[int, int], ...]:
        """Return the path of a token that branches off at ``depth`` of the sequence that ends with these tokens."""
        kept = []
        for start, stop in (*self.path, (self.start, self.stop)):
            stop = min(stop, start + depth)
            depth -= stop - start
            if start < stop:
                kept.append((start, stop))
        return tuple(kept)


@dataclass(frozen=True, slots=True)
class Tree:
    """Where a tree lies in its row."""

    start: int
    stop: int
    tails: tuple[Tail, ...]
    """Its tokens in order. A tree that does not branch has one tail."""


def lay_out(
    sequences: list[np.ndarray],
    trees_D: np.ndarray,
    row_of_tree: np.ndarray,
    order: np.ndarray,
    prefix_DD: np.ndarray,
    shape: RowShape,
    pad_token_id: int,
    depths: list[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray], tuple[Tree, ...]]:
    """Write each tree into its row, depth first, after those that are there; sequences in tree -1 are left out.

    Of ``prefix_DD`` only what a sequence shares with the one before it, in its tree and in ``order``, is read.

    Args:
        depths: Indices of the tokens of each sequence whose columns are asked for.

    Returns:
        The rows' token ids, position ids and ends of subtrees, [R, L] each; the columns of the tokens in ``depths``;
        and where the trees lie.
    """
    rows, length = shape.rows, shape.length
    columns = np.arange(max(length, max(map(len, sequences))), dtype=np.int32)
    input_ids_RL = np.full((rows, length), pad_token_id, np.int32)
    position_ids_RL = np.zeros((rows, length), np.int32)
    subtree_end_RL = np.tile(columns[:length] + 1, (rows, 1))
    found = [np.zeros_like(each) for each in depths]

    path = np.zeros_like(columns)  # by depth, the column of the current sequence's token
    # of each tree's sequences: depth where its own tokens start, its length, their first column, the one after them
    written: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    stops_R = np.zeros(rows, np.int64)
    before = -1
    for index in order[np.argsort(trees_D[order], kind="stable")]:
        tree, ids = trees_D[index], sequences[index]
        if tree < 0:
            continue
        row = row_of_tree[tree]
        depth = prefix_DD[before, index] if written[tree] else 0
        start, stop = stops_R[row], stops_R[row] + len(ids) - depth
        stops_R[row] = stop
        input_ids_RL[row, start:stop] = ids[depth:]
        position_ids_RL[row, start:stop] = columns[depth : len(ids)]
        path[depth : len(ids)] = columns[start:stop]
        found[index] = path[depths[index]]
        written[tree].append((int(depth), len(ids), int(start), int(stop)))
        before = index

    trees = []
    for tree, parts in written.items():
        tails: list[Tail] = []
        for depth, _, start, stop in parts:
            _grow(tails, depth, stop - start)
        trees.append(Tree(parts[0][2], stop, tuple(tails)))
        ends = np.full_like(columns, stop)  # by depth, where the subtree of a token at that depth ends
        for depth, size, start, stop in reversed(parts):
            subtree_end_RL[row_of_tree[tree], start:stop] = ends[depth:size]
            ends[depth:] = start
    return input_ids_RL, position_ids_RL, subtree_end_RL, found, tuple(trees)


def _grow(tails: list[Tail], depth: int, size: int) -> None:
    """Let a sequence follow that leaves the one before it at ``depth`` and adds ``size`` tokens."""
    last = tails[-1] if tails else Tail(0, 0, ())
    path = last.after(depth)
    if path and path[-1][1] == last.stop:  # it goes on where the one before it ended
        tails[-1] = replace(last, stop=last.stop + size)
    else:
        tails.append(Tail(last.stop, last.stop + size, path))
