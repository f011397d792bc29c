"""Packs the sequences of one batch into rows that hold every shared prefix once. numpy only.

`pack` writes rows of a few planned shapes, for a device that compiles each; `pack_unpadded` writes one row without
padding, for a device that takes any shape.

The sequences of a row form a trie. Written depth first, with the sequences in lexicographic order, each sequence adds
the tokens that its predecessor does not share, so a pair becomes ``prefix | one tail | other tail``, and pairs that
share their prompt, or only a system prompt, share its tokens too. What is said of pairs holds for prompts with more
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
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from .rows import TokenRows, expand_rows
from .shapes import RowPlan, RowShape, Schedule, zigzag
from .trees import common_prefixes, lay_out, tree_sizes

# A token saved by sharing is saved for sure; a row filled more tightly only may save one later.
_TOKENS_PER_FREE_TOKEN = 4


class Scored(NamedTuple):
    """One row of the data: its sequences, and the tokens at which rewards are read."""

    sequences: list[np.ndarray]
    """Token ids of the answers, the chosen one first; of a solution with steps one sequence."""
    at: list[np.ndarray]
    """For each sequence the indices of its scored tokens, ascending."""


def pack(
    rows: Sequence[Scored],
    plan: RowPlan,
    most_pairs: int,
    pad_token_id: int,
    answers: int = 2,
    expands: bool = False,
    part: tuple[int, int] = (0, 1),
) -> list[TokenRows[np.ndarray]]:
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
    batch = _Batch.read(rows, most_pairs, answers, pad_token_id)
    schedule, rows_P = _choose(batch, plan, expands)
    (index, count), micro_batches, before = part, [], 0
    for shape in schedule:
        own = RowShape(shape.rows // count, shape.length)
        first = before + index * own.rows
        here_P = (first <= rows_P) & (rows_P < first + own.rows)
        trees_P = np.where(here_P, rows_P - first, -1)  # one tree a row; pairs in tree -1 are elsewhere
        written = batch.written(trees_P[batch.pair_D], np.arange(own.rows), own)
        micro_batches.append(replace(written, trees=None, expansion=expand_rows(written) if expands else None))
        before += shape.rows
    return micro_batches


def pack_unpadded(
    rows: Sequence[Scored],
    pad_token_id: int,
    most_pairs: int | None = None,
    answers: int = 2,
    attention_crossover_length: float = 4096,
) -> TokenRows[np.ndarray]:
    """Pack one batch into a single row without padding, tree after tree.

    Attention can then be computed tree by tree. Sequences are in one tree where sharing saves more than attention over
    the larger tree costs.

    Args:
        rows, pad_token_id, answers: As in `pack`.
        most_pairs: P; by default as many as there are.
        attention_crossover_length: The length at which attention costs as much as everything else.
    """
    batch = _Batch.read(rows, most_pairs or len(rows), answers, pad_token_id)
    trees_D = _grow_trees(batch, attention_crossover_length)
    return batch.written(trees_D, np.zeros(len(trees_D), int), RowShape(1, batch.tokens_in(trees_D)))


def pad(
    rows: Sequence[Scored], shape: RowShape, most_pairs: int, pad_token_id: int, answers: int = 2
) -> TokenRows[np.ndarray]:
    """Write each sequence into a row of its own, padded on the right.

    Args:
        rows, pad_token_id, answers: As in `pack`.
        shape: Of the rows, which may be more than there are sequences.
        most_pairs: P.
    """
    sequences = [ids for row in rows for ids in row.sequences]
    input_ids_RL = np.full((shape.rows, shape.length), pad_token_id, np.int32)
    lengths_R = np.ones(shape.rows, np.int32)  # a row in which all is masked could become NaN
    for place, ids in enumerate(sequences):
        input_ids_RL[place, : len(ids)] = ids
        lengths_R[place] = len(ids)
    columns, rows_D = [at for row in rows for at in row.at], np.arange(len(sequences))
    scores: dict[str, Any] = _score_table(rows, columns, rows_D, rows_D >= 0, most_pairs, answers)
    return TokenRows(
        input_ids_RL,
        **scores,
        attention_mask_RL=(np.arange(shape.length) < lengths_R[:, None]).astype(np.int32),
    )


def _score_table(
    rows: Sequence[Scored],
    columns: Sequence[np.ndarray],
    row_D: np.ndarray,
    here_D: np.ndarray,
    most_pairs: int,
    answers: int,
) -> dict[str, np.ndarray]:
    """Return `score_row_S`, `score_column_S` and `tokens_S`, with zeros for sequences that are not in these rows.

    Args:
        columns: Of the scored tokens of each sequence.
        row_D: The row of each sequence.
        here_D: Which sequences are in these rows.
    """
    table_3PK = np.zeros((3, most_pairs, answers), np.int32)
    sequence = 0
    for pair, row in enumerate(rows):
        place = 0
        for ids, at in zip(*row, strict=True):
            if here_D[sequence]:
                stop = place + len(at)
                table_3PK[0, pair, place:stop] = row_D[sequence]
                table_3PK[1, pair, place:stop] = columns[sequence]
                # the last reward of a sequence adds the rest of it, even what follows its scored token
                table_3PK[2, pair, place:stop] = np.diff([0, *(at[:-1] + 1), len(ids)])[: len(at)]
                place = stop
            sequence += 1
    names = ("score_row_S", "score_column_S", "tokens_S")
    return dict(zip(names, table_3PK.reshape(3, -1), strict=True))


@dataclass(frozen=True)
class _Batch:
    """The sequences of a batch, those of a pair one after another, and what any two of them share."""

    rows: Sequence[Scored]
    sequences: list[np.ndarray]
    """Up to the last scored token: later tokens cannot influence a reward."""
    firsts_P: np.ndarray
    """The first sequence of each pair."""
    shape: tuple[int, int]
    """P and K."""
    order: np.ndarray
    prefix_DD: np.ndarray
    pad_token_id: int

    @classmethod
    def read(cls, rows: Sequence[Scored], most_pairs: int, answers: int, pad_token_id: int) -> "_Batch":
        if len(rows) > most_pairs:
            raise UserError(f"A batch has at most {most_pairs} pairs, as its shapes were planned; got {len(rows)}.")
        sequences = [ids[: at[-1] + 1] if len(at) else ids[:1] for row in rows for ids, at in zip(*row, strict=True)]
        firsts_P = np.cumsum([0, *(len(row.sequences) for row in rows)])[:-1]
        order, prefix_DD = common_prefixes(sequences)
        return cls(rows, sequences, firsts_P, (most_pairs, answers), order, prefix_DD, pad_token_id)

    @property
    def pair_D(self) -> np.ndarray:
        """The pair of each sequence."""
        return np.searchsorted(self.firsts_P, np.arange(len(self.sequences)), side="right") - 1

    @property
    def lengths_D(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.sequences])

    def tokens_in(self, trees_D: np.ndarray) -> int:
        """Return how many tokens the sequences have in these trees, each of which has neighbors in the order."""
        one_D, next_D = self.order[:-1], self.order[1:]
        shared_D = np.where(trees_D[one_D] == trees_D[next_D], self.prefix_DD[one_D, next_D], 0)
        return int(self.lengths_D.sum() - shared_D.sum())

    def written(self, trees_D: np.ndarray, row_of_tree: np.ndarray, shape: RowShape) -> TokenRows[np.ndarray]:
        """Write each tree's sequences into its row of ``shape``; those in tree -1 are elsewhere."""
        at = [each for row in self.rows for each in row.at]
        input_ids_RL, position_ids_RL, subtree_end_RL, columns, trees = lay_out(
            self.sequences, trees_D, row_of_tree, self.order, self.prefix_DD, shape, self.pad_token_id, at
        )
        scores: dict[str, Any] = _score_table(self.rows, columns, row_of_tree[trees_D], trees_D >= 0, *self.shape)
        return TokenRows(
            input_ids_RL,
            **scores,
            position_ids_RL=position_ids_RL,
            subtree_end_RL=subtree_end_RL,
            trees=trees,
        )


def last_scored(ids: np.ndarray, pad_token_id: int) -> int:
    """Return the index of the last token that is not the pad token, or 0: there transformers reads a reward."""
    if ids[-1] != pad_token_id:
        return len(ids) - 1
    others = np.flatnonzero(ids != pad_token_id)
    return int(others[-1]) if len(others) else 0


def _choose(batch: _Batch, plan: RowPlan, expands: bool) -> tuple[Schedule, np.ndarray]:
    """Return the cheapest schedule that holds the batch, and each pair's row among all rows of it [P]."""
    sizes_P, shared_PP = tree_sizes(batch.order, batch.prefix_DD, batch.firsts_P)
    lengths_P2 = batch.lengths_D.reshape(-1, 2) if expands else None
    fewest = batch.tokens_in(np.zeros(len(batch.sequences), int))  # in one trie
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
        rows_P = _place(sizes_P, shared_PP, lengths_P2, lengths_R)
        if rows_P is not None:
            return schedule, rows_P
    # Best fit may fail by bad luck where `zigzag`, by which the last shape was made, cannot.
    last = plan.update[-1]
    rows_P = np.empty(len(sizes_P), np.int64)
    rows_P[np.argsort(-sizes_P, kind="stable")] = zigzag(len(sizes_P), last.rows)
    if np.bincount(rows_P, sizes_P).max() > last.length:
        raise UserError(
            f"A batch of {len(sizes_P)} pairs with {sizes_P.sum()} tokens fits none of the planned shapes "
            f"{plan}. Plan the shapes with the sizes of these pairs among them."
        )
    return (last,), rows_P


def _place(
    sizes_P: np.ndarray, shared_PP: np.ndarray, lengths_P2: np.ndarray | None, lengths_R: np.ndarray
) -> np.ndarray | None:
    """Place pairs by best fit, the largest first: return each pair's row [P], or None where they do not fit.

    What a pair adds to a row is its size less what it shares with the pair in that row that it shares most with; the
    trie may save more, never less. With ``lengths_P2`` its two sequences need room too, where nothing is shared.
    """
    free_R = lengths_R.copy()
    free_R2 = np.repeat(lengths_R[:, None], 2, axis=1)
    shared_RP = np.zeros((len(lengths_R), len(sizes_P)), shared_PP.dtype)
    rows_P = np.empty(len(sizes_P), np.int64)
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
        rows_P[pair] = row
        free_R[row] -= added_R[row]
        if lengths_P2 is not None:
            free_R2[row] -= lengths_P2[pair]
        np.maximum(shared_RP[row], shared_PP[pair], out=shared_RP[row])
    return rows_P


def _grow_trees(batch: _Batch, attention_crossover_length: float) -> np.ndarray:
    """Return each sequence's tree [D]: neighbors in lexicographic order share one while that costs less than two."""

    def work(size: int) -> float:
        return size * (1 + size / attention_crossover_length)

    trees_D = np.zeros(len(batch.sequences), np.int64)
    tree, size, before = -1, 0, 0
    for index, length in zip(batch.order.tolist(), batch.lengths_D[batch.order].tolist(), strict=True):
        together = size + length - int(batch.prefix_DD[before, index])
        if tree >= 0 and work(together) < work(size) + work(length):
            size = together
        else:
            tree, size = tree + 1, length
        trees_D[index], before = tree, index
    return trees_D
