"""Packs the token pairs of one batch into rows that hold every shared prefix once. numpy only.

`pack` writes rows of a few planned shapes, for a device that compiles each; `pack_unpadded` writes one row without
padding, for a device that takes any shape.

The dialogues of a row form a trie. Written depth first, with the dialogues in lexicographic order, each dialogue adds
the tokens that its predecessor does not share, so a pair becomes ``prefix | one tail | other tail``, and pairs that
share their prompt, or only a system prompt, share its tokens too. A position id is the depth in the trie, which is the
token's index in its own dialogue. One integer a token says who sees whom: ``subtree_end[k]`` is the column where the
tokens that continue k's text end, and the token in column q sees the one in k exactly when
``k <= q < subtree_end[k]``. That also isolates pairs that only share a row.

Rows and devices: of the R rows of a micro-batch on S shards, row r belongs to shard ``r // (R / S)``. A pair lies
whole in one row, and any row may hold any pair: `last_row_P2` and `last_column_P2` address all of them, in the batch's
own order of pairs. All rows of a micro-batch have the same length and a device computes all of it, so devices have
equal work whatever their rows hold.
With several hosts each host packs the whole batch, which is deterministic, and keeps its own slice of rows and pairs;
of processes with a device each, every one writes the rows of its device, its part.

Letters: B batches, P pairs, D dialogues (2P: chosen, rejected, chosen, ...), R rows, L length of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UserError
from .expand import expand_rows
from .rows import PackedRows
from .schedule import RowPlan, Schedule
from .shapes import RowShape, zigzag
from .trie import common_prefixes, lay_out, tree_sizes

# A token saved by sharing is saved for sure; a row filled more tightly only may save one later.
_TOKENS_PER_FREE_TOKEN = 4


def pack(
    chosen: Sequence[Sequence[int]],
    rejected: Sequence[Sequence[int]],
    plan: RowPlan,
    pairs: int,
    pad_token_id: int,
    margins: Sequence[float] | None = None,
    expands: bool = False,
    part: tuple[int, int] = (0, 1),
) -> list[PackedRows[np.ndarray]]:
    """Pack one batch by the cheapest schedule of ``plan`` that holds it.

    A dialogue is scored at its last token that is not the pad token, as transformers does; later tokens, which exist
    only where texts contain the pad token, cannot influence that score and are left out.

    Args:
        chosen: Token ids of the chosen dialogue of each pair.
        rejected: Token ids of the rejected one.
        plan: From `plan_rows`.
        pairs: P. A batch may have fewer, but not more.
        pad_token_id: Fills what rows have left.
        margins: The target margin of each pair.
        expands: Whether attention reads rows of whole dialogues: then the rows have their `expansion`, and pairs share
            a row only if their chosen dialogues, one after the other, fit into its length, and the rejected ones too.
        part: Which rows of each micro-batch to write, the first having (0, count). The parts of all are its rows.

    Returns:
        The micro-batches in order; the last one updates.

    Raises:
        UserError: If a pair is longer than the longest row, there are too many, or the batch fits no shape.
    """
    batch = _Batch.read(chosen, rejected, pairs, pad_token_id, margins)
    schedule, rows_P = _choose(batch, plan, expands)
    (index, count), micro_batches, before = part, [], 0
    for shape in schedule:
        own = RowShape(shape.rows // count, shape.length)
        first = before + index * own.rows
        here_P = (first <= rows_P) & (rows_P < first + own.rows)
        trees_P = np.where(here_P, rows_P - first, -1)  # one tree a row; pairs in tree -1 are elsewhere
        rows = batch.written(np.repeat(trees_P, 2), np.arange(own.rows), own, count)
        micro_batches.append(replace(rows, trees=None, expansion=expand_rows(rows) if expands else None))
        before += shape.rows
    return micro_batches


def pack_unpadded(
    chosen: Sequence[Sequence[int]],
    rejected: Sequence[Sequence[int]],
    pad_token_id: int,
    margins: Sequence[float] | None = None,
    attention_crossover_length: float = 4096,
) -> PackedRows[np.ndarray]:
    """Pack one batch into a single row without padding, tree after tree.

    Attention can then be computed tree by tree. Dialogues are in one tree where sharing saves more than attention over
    the larger tree costs.

    Args:
        chosen, rejected, pad_token_id, margins: As in `pack`.
        attention_crossover_length: The length at which attention costs as much as everything else.
    """
    batch = _Batch.read(chosen, rejected, len(chosen), pad_token_id, margins)
    trees_D = _grow_trees(batch, attention_crossover_length)
    return batch.written(trees_D, np.zeros(len(trees_D), int), RowShape(1, batch.tokens_in(trees_D)))


@dataclass(frozen=True)
class _Batch:
    """The dialogues of a batch, chosen and rejected in turn, and what any two of them share."""

    dialogues: list[np.ndarray]
    order: np.ndarray
    prefix_DD: np.ndarray
    tokens_P: np.ndarray
    margin_P: np.ndarray | None
    pairs: int
    pad_token_id: int

    @classmethod
    def read(
        cls,
        chosen: Sequence[Sequence[int]],
        rejected: Sequence[Sequence[int]],
        pairs: int,
        pad_token_id: int,
        margins: Sequence[float] | None,
    ) -> "_Batch":
        if len(chosen) > pairs:
            raise UserError(f"A batch has at most {pairs} pairs, as its shapes were planned; got {len(chosen)}.")
        whole = [np.asarray(ids, np.int32) for pair in zip(chosen, rejected, strict=True) for ids in pair]
        dialogues = [up_to_scored(ids, pad_token_id) for ids in whole]
        tokens_P = np.array([len(ids) for ids in whole], np.int32).reshape(-1, 2).sum(axis=1)
        margin_P = None if margins is None else np.asarray(margins, np.float32)
        return cls(dialogues, *common_prefixes(dialogues), tokens_P, margin_P, pairs, pad_token_id)

    @property
    def lengths_D(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.dialogues])

    def tokens_in(self, trees_D: np.ndarray) -> int:
        """Return how many tokens the dialogues have in these trees, each of which has neighbors in the order."""
        one_D, next_D = self.order[:-1], self.order[1:]
        shared_D = np.where(trees_D[one_D] == trees_D[next_D], self.prefix_DD[one_D, next_D], 0)
        return int(self.lengths_D.sum() - shared_D.sum())

    def written(
        self, trees_D: np.ndarray, row_of_tree: np.ndarray, shape: RowShape, parts: int = 1
    ) -> PackedRows[np.ndarray]:
        """Write each tree's dialogues into its row of ``shape``, one of ``parts``; those in tree -1 are elsewhere."""
        here_P = trees_D[::2] >= 0
        layout = lay_out(self.dialogues, trees_D, row_of_tree, self.order, self.prefix_DD, shape, self.pad_token_id)

        def fill(values: np.ndarray, dtype: type = np.int32) -> np.ndarray:
            """Put zeros for the pairs that are elsewhere, and up to P."""
            filled = np.zeros((self.pairs, *values.shape[1:]), dtype)
            filled[: len(values)][here_P] = values[here_P]
            return filled

        return PackedRows(
            layout.input_ids_RL,
            layout.position_ids_RL,
            layout.subtree_end_RL,
            last_row_P2=fill(row_of_tree[trees_D].reshape(-1, 2)),
            last_column_P2=fill(layout.last_column_D.reshape(-1, 2)),
            pair_mask_P=fill(here_P, bool),
            tokens_P=fill(self.tokens_P),
            margin_P=None if self.margin_P is None else fill(self.margin_P, np.float32),
            batch_pairs_1=np.array([len(here_P) / parts], np.float32),
            trees=layout.trees,
        )


def up_to_scored(ids: np.ndarray, pad_token_id: int) -> np.ndarray:
    """Cut a dialogue after the token that is scored: the last that is not the pad token, or the first if all are."""
    if ids[-1] != pad_token_id:
        return ids
    others = np.flatnonzero(ids != pad_token_id)
    return ids[: others[-1] + 1] if len(others) else ids[:1]


def _choose(batch: _Batch, plan: RowPlan, expands: bool) -> tuple[Schedule, np.ndarray]:
    """Return the cheapest schedule that holds the batch, and each pair's row among all rows of it [P]."""
    sizes_P, shared_PP = tree_sizes(batch.prefix_DD)
    lengths_P2 = batch.lengths_D.reshape(-1, 2) if expands else None
    fewest = batch.tokens_in(np.zeros(len(batch.dialogues), int))  # in one trie
    if sizes_P.max() > plan.longest:
        pair = int(sizes_P.argmax())
        raise UserError(
            f"Pair {pair} of the batch takes {sizes_P[pair]} tokens (both dialogues, their common prefix once), but "
            f"the longest planned row has {plan.longest}. Pairs are never cut: plan the shapes with this pair's size "
            "among them, or leave out long dialogues with `max_length`."
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
    trie may save more, never less. With ``lengths_P2`` its two dialogues need room too, where nothing is shared.
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
    """Return each dialogue's tree [D]: neighbors in lexicographic order share one while that costs less than two."""

    def work(size: int) -> float:
        return size * (1 + size / attention_crossover_length)

    trees_D = np.zeros(len(batch.dialogues), np.int64)
    tree, size, before = -1, 0, 0
    for index, length in zip(batch.order.tolist(), batch.lengths_D[batch.order].tolist(), strict=True):
        together = size + length - int(batch.prefix_DD[before, index])
        if tree >= 0 and work(together) < work(size) + work(length):
            size = together
        else:
            tree, size = tree + 1, length
        trees_D[index], before = tree, index
    return trees_D
