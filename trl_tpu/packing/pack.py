"""Packs the sequences of one batch into rows that hold every shared prefix once, with numpy.

`pack_unpadded` writes one row without padding, for a device that takes any shape; `pad` writes a row for each
sequence; `planned.pack` writes rows of a few planned shapes, for a device that compiles each.

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

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .batch import Batch, Comparisons, Tail, Tree
from .shapes import RowShape, round_up


@dataclass(frozen=True)
class Sequences:
    """A batch before it is laid out: its sequences, where their rewards are read, and how these are compared.

    Args:
        ids: Token ids of each sequence, those of a row of the data one after another; of a solution there is one.
        at: For each the indices of its scored tokens, ascending.
        pair_D: The row of the data of each, a pair say.
        pad_token_id: Fills what rows of tokens have left.
        table: Compares the rewards of P rows of the data, each with at most K scored tokens.
        chunk: Sequences are padded to a multiple of this, and share a multiple of it.
    """

    ids: list[np.ndarray]
    at: list[np.ndarray]
    pair_D: np.ndarray
    pad_token_id: int
    table: Comparisons[np.ndarray]
    chunk: int = 1

    @property
    def rows(self) -> int:
        """P, the most rows of the data."""
        return len(self.table.row_weight_P)

    @property
    def answers(self) -> int:
        """K, the most scored tokens of a row of the data."""
        return self.table.answers

    @cached_property
    def tokens(self) -> list[np.ndarray]:
        """For each sequence the tokens that each of its rewards adds to those before it.

        The last reward of a sequence adds the rest of it, even what follows its scored token.
        """
        pairs = zip(self.ids, self.at, strict=True)
        return [np.diff([0, *(at[:-1] + 1), len(ids)])[: len(at)] for ids, at in pairs]

    @cached_property
    def cut(self) -> list[np.ndarray]:
        """Their ids up to the last scored tokens: later tokens cannot influence a reward."""
        pairs = zip(self.ids, self.at, strict=True)
        cut = [ids[: at[-1] + 1] if len(at) else ids[:1] for ids, at in pairs]
        if self.chunk == 1:
            return cut
        return [np.pad(ids, (0, -len(ids) % self.chunk), constant_values=self.pad_token_id) for ids in cut]

    @cached_property
    def prefixes(self) -> tuple[np.ndarray, np.ndarray]:
        """See `common_prefixes`."""
        order, prefix_DD = common_prefixes(self.cut)
        return order, prefix_DD // self.chunk * self.chunk

    def written(self, row_D: np.ndarray, tree_D: np.ndarray, shape: RowShape) -> Batch[np.ndarray]:
        """Write sequences into rows of ``shape``, depth first, tree after tree.

        Args:
            row_D: The row of tokens of each sequence; -1 leaves it out.
            tree_D: Its tree. Trees of one row have consecutive numbers, and rows ascend with them.
            shape: Of the rows.
        """
        order, prefix_DD = self.prefixes
        columns = np.arange(max(shape.length, max(map(len, self.cut))), dtype=np.int32)
        input_ids_RL = np.full((shape.rows, shape.length), self.pad_token_id, np.int32)
        position_ids_RL = np.zeros((shape.rows, shape.length), np.int32)
        subtree_end_RL = np.tile(columns[: shape.length] + 1, (shape.rows, 1))
        scores_3S, slots = np.zeros((3, self.rows * self.answers), np.int32), self.slots()

        path = np.zeros_like(columns)  # by depth, the column of the current sequence's token
        segments = list[tuple[int, int, int, int, int]]()  # row, columns and depths of what each sequence adds
        trees, tails = list[tuple[int, list[Tail]]](), list[Tail]()  # where each tree begins, and its tails
        before, first, stop = -1, 0, 0
        for index in order[np.argsort(tree_D[order], kind="stable")].tolist():
            row, ids, at = int(row_D[index]), self.cut[index], self.at[index]
            if row < 0:
                continue
            is_new = before < 0 or tree_D[index] != tree_D[before]
            if before < 0 or row != row_D[before]:
                stop = 0
            depth = 0 if is_new else int(prefix_DD[before, index])
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
            scores_3S[:, slots[index]] = np.full_like(at, row), path[at], self.tokens[index]

        end, after = np.empty_like(columns), -1  # by depth, where the subtree of a token at that depth ends
        for row, start, stop, depth, size in reversed(segments):
            if row != after:
                end[:], after = stop, row
            subtree_end_RL[row, start:stop] = end[depth:size]
            end[depth:] = start
        whole = tuple(Tree(first, first + tails[-1].stop, tuple(tails)) for first, tails in trees)
        of_tokens = {"position_ids_RL": position_ids_RL, "subtree_end_RL": subtree_end_RL}
        return self.batch_of(input_ids_RL, scores_3S, **of_tokens, trees=whole)

    def batch_of(self, input_ids_RL: np.ndarray, scores_3S: np.ndarray, **layout: Any) -> Batch[np.ndarray]:
        """Return the batch of rows of tokens, with the comparisons of those rewards that are read in them.

        Args:
            scores_3S: For each reward its row, its column and its tokens, of which 0 say that it is elsewhere.
            **layout: Other fields of the batch.
        """
        row_S, column_S, tokens_S = scores_3S
        table = self.table.among(tokens_S.reshape(-1, self.answers).any(-1))
        return Batch(input_ids_RL, row_S, column_S, tokens_S, table, pad_token_id=self.pad_token_id, **layout)

    def slots(self) -> list[slice]:
        """Return the numbers of each sequence's rewards among those of the batch, [S]."""
        count_D = np.array(list(map(len, self.at)))
        before_D = np.cumsum(count_D) - count_D
        first_D = self.pair_D * self.answers + before_D - before_D[np.searchsorted(self.pair_D, self.pair_D)]
        return [slice(first, first + count) for first, count in zip(first_D.tolist(), count_D.tolist(), strict=True)]


def pack_unpadded(sequences: Sequences, attention_crossover_length: float = 4096) -> list[Batch[np.ndarray]]:
    """Pack one batch into a single row without padding, tree after tree.

    Attention can then be computed tree by tree. Neighbors in lexicographic order share a tree where sharing saves more
    than attention over the larger tree costs.

    Args:
        sequences: At least one sequence.
        attention_crossover_length: The length at which attention costs as much as everything else.
    """

    def work(size: int) -> float:
        return size * (1 + size / attention_crossover_length)

    order, prefix_DD = sequences.prefixes
    tree_D = np.zeros(len(order), np.int64)
    tree, size, length, before = -1, 0, 0, 0
    for index in order.tolist():
        added = len(sequences.cut[index])
        on_all_ranks = size + added - int(prefix_DD[before, index])
        if tree >= 0 and work(on_all_ranks) < work(size) + work(added):
            length, size = length + on_all_ranks - size, on_all_ranks
        else:
            length, size, tree = length + added, added, tree + 1
        tree_D[index], before = tree, index
    return [sequences.written(np.zeros_like(tree_D), tree_D, RowShape(1, length))]


def pad(sequences: Sequences, lengths: tuple[int, ...] | None = None, multiple: int = 1) -> list[Batch[np.ndarray]]:
    """Write each sequence, as long as it is, into a row of its own, padded on the right.

    Args:
        sequences: At least one sequence.
        lengths: Planned lengths, ascending: rows get the shortest that fits, else the longest sequence's, and there
            are always as many rows as P rows of the data can have. None keeps the number of sequences, too.
        multiple: Of lengths that are not planned.
    """
    count, longest = len(sequences.ids), max(map(len, sequences.ids))
    length = next((each for each in lengths or () if each >= longest), round_up(longest, multiple))
    has_several = sequences.pair_D[-1] + 1 < count  # the steps of a solution are one sequence
    rows = count if lengths is None else sequences.rows * (sequences.answers if has_several else 1)
    input_ids_RL = np.full((rows, length), sequences.pad_token_id, np.int32)
    mask_RL = np.zeros((rows, length), np.int32)
    mask_RL[:, 0] = 1  # rows without a token could become NaN
    scores_3S = np.zeros((3, sequences.rows * sequences.answers), np.int32)
    for row, (ids, at, slots) in enumerate(zip(sequences.ids, sequences.at, sequences.slots(), strict=True)):
        input_ids_RL[row, : len(ids)], mask_RL[row, : len(ids)] = ids, 1
        scores_3S[:, slots] = np.full_like(at, row), at, sequences.tokens[row]
    return [sequences.batch_of(input_ids_RL, scores_3S, attention_mask_RL=mask_RL)]


def _ranges(columns: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return ascending columns as ranges."""
    parts = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1) if len(columns) else []
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)


def last_scored(ids: np.ndarray, pad_token_id: int) -> int:
    """Return the index of the last token that is not the pad token, or 0: there transformers reads a reward."""
    others = np.flatnonzero(ids != pad_token_id)
    return int(others[-1]) if len(others) else 0


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
