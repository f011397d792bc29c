"""Packs the dialogues of one batch into rows that hold every shared prefix once. numpy only.

`pack` writes rows of a few planned shapes, for a device that compiles each; `pack_unpadded` writes one row without
padding, for a device that takes any shape.

The dialogues of a row form a trie. Written depth first, with the dialogues in lexicographic order, each dialogue adds
the tokens that its predecessor does not share, so a pair becomes ``prefix | one tail | other tail``, and pairs that
share their prompt, or only a system prompt, share its tokens too. What is said of pairs holds for prompts with more
answers: they are a pair's two dialogues or more. A position id is the depth in the trie, which is the
token's index in its own dialogue. One integer a token says who sees whom: ``subtree_end[k]`` is the column where the
tokens that continue k's text end, and the token in column q sees the one in k exactly when
``k <= q < subtree_end[k]``. That also isolates pairs that only share a row.

Rows and devices: of the R rows of a micro-batch on S shards, row r belongs to shard ``r // (R / S)``. A pair lies
whole in one row, and any row may hold any pair: `last_row_PK` and `last_column_PK` address all of them, in the batch's
own order of pairs. All rows of a micro-batch have the same length and a device computes all of it, so devices have
equal work whatever their rows hold.
With several hosts each host packs the whole batch, which is deterministic, and keeps its own slice of rows and pairs;
of processes with a device each, every one writes the rows of its device, its part.

Letters: B batches, P pairs, K answers of each, D dialogues (those of a pair one after another), R rows, L length of a
row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import UserError
from .expand import expand_rows
from .rows import PackedRows
from .schedule import RowPlan, Schedule
from .shapes import RowShape, zigzag
from .trie import common_prefixes, lay_out, tree_sizes

# A token saved by sharing is saved for sure; a row filled more tightly only may save one later.
_TOKENS_PER_FREE_TOKEN = 4


Dialogues = Sequence[Sequence[Sequence[int]]]
"""The token ids of each pair's dialogues, the chosen one first, or of each prompt's answers."""


def pack(
    pairs: Dialogues,
    plan: RowPlan,
    most_pairs: int,
    pad_token_id: int,
    labels: Mapping[str, np.ndarray] | None = None,
    answers: int = 2,
    expands: bool = False,
    part: tuple[int, int] = (0, 1),
) -> list[PackedRows[np.ndarray]]:
    """Pack one batch by the cheapest schedule of ``plan`` that holds it.

    A dialogue is scored at its last token that is not the pad token, as transformers does; later tokens, which exist
    only where texts contain the pad token, cannot influence that score and are left out.

    Args:
        pairs: Token ids.
        plan: From `plan_rows`.
        most_pairs: P. A batch may have fewer, but not more.
        pad_token_id: Fills what rows have left.
        labels: What the data says of each pair, [pairs, ...].
        answers: K. A pair may have fewer dialogues, but not more.
        expands: Whether attention reads rows of whole dialogues: then the rows have their `expansion`, and pairs share
            a row only if their chosen dialogues, one after the other, fit into its length, and the rejected ones too.
        part: Which rows of each micro-batch to write, the first having (0, count). The parts of all are its rows.

    Returns:
        The micro-batches in order; the last one updates.

    Raises:
        UserError: If a pair is longer than the longest row, there are too many, or the batch fits no shape.
    """
    batch = _Batch.read(pairs, most_pairs, answers, pad_token_id, labels or {})
    schedule, rows_P = _choose(batch, plan, expands)
    (index, count), micro_batches, before = part, [], 0
    for shape in schedule:
        own = RowShape(shape.rows // count, shape.length)
        first = before + index * own.rows
        here_P = (first <= rows_P) & (rows_P < first + own.rows)
        trees_P = np.where(here_P, rows_P - first, -1)  # one tree a row; pairs in tree -1 are elsewhere
        rows = batch.written(trees_P[batch.pair_D], np.arange(own.rows), own, count)
        micro_batches.append(replace(rows, trees=None, expansion=expand_rows(rows) if expands else None))
        before += shape.rows
    return micro_batches


def pack_unpadded(
    pairs: Dialogues,
    pad_token_id: int,
    labels: Mapping[str, np.ndarray] | None = None,
    answers: int = 2,
    attention_crossover_length: float = 4096,
) -> PackedRows[np.ndarray]:
    """Pack one batch into a single row without padding, tree after tree.

    Attention can then be computed tree by tree. Dialogues are in one tree where sharing saves more than attention over
    the larger tree costs.

    Args:
        pairs, pad_token_id, labels, answers: As in `pack`.
        attention_crossover_length: The length at which attention costs as much as everything else.
    """
    batch = _Batch.read(pairs, len(pairs), answers, pad_token_id, labels or {})
    trees_D = _grow_trees(batch, attention_crossover_length)
    return batch.written(trees_D, np.zeros(len(trees_D), int), RowShape(1, batch.tokens_in(trees_D)))


@dataclass(frozen=True)
class _Batch:
    """The dialogues of a batch, those of a pair one after another, and what any two of them share."""

    dialogues: list[np.ndarray]
    firsts_P: np.ndarray
    """The first dialogue of each pair."""
    shape: tuple[int, int]
    """P and K."""
    order: np.ndarray
    prefix_DD: np.ndarray
    tokens_P: np.ndarray
    labels: Mapping[str, np.ndarray]
    pad_token_id: int

    @classmethod
    def read(
        cls, pairs: Dialogues, most_pairs: int, answers: int, pad_token_id: int, labels: Mapping[str, np.ndarray]
    ) -> "_Batch":
        if len(pairs) > most_pairs:
            raise UserError(f"A batch has at most {most_pairs} pairs, as its shapes were planned; got {len(pairs)}.")
        whole = [np.asarray(ids, np.int32) for dialogues in pairs for ids in dialogues]
        firsts_P = np.cumsum([0, *map(len, pairs)])[:-1]
        # a solution's dialogues are one, up to each step's end, which is read whatever the token there is
        is_solution = "step" in labels
        total = np.maximum if is_solution else np.add
        tokens_P = total.reduceat(np.array([len(ids) for ids in whole], np.int32), firsts_P)
        dialogues = whole if is_solution else [up_to_scored(ids, pad_token_id) for ids in whole]
        order, prefix_DD = common_prefixes(dialogues)
        return cls(dialogues, firsts_P, (most_pairs, answers), order, prefix_DD, tokens_P, labels, pad_token_id)

    @property
    def pair_D(self) -> np.ndarray:
        """The pair of each dialogue."""
        return np.searchsorted(self.firsts_P, np.arange(len(self.dialogues)), side="right") - 1

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
        here_P, here_D = trees_D[self.firsts_P] >= 0, trees_D >= 0
        pair_D, (pairs, _) = self.pair_D, self.shape
        weight = max(1, self.labels["weight"].sum()) if "weight" in self.labels else len(here_P)
        answer_D = np.arange(len(pair_D)) - self.firsts_P[pair_D]
        input_ids_RL, position_ids_RL, subtree_end_RL, last_column_D, trees = lay_out(
            self.dialogues, trees_D, row_of_tree, self.order, self.prefix_DD, shape, self.pad_token_id
        )

        def fill(values_P: np.ndarray, dtype: Any = None) -> np.ndarray:
            """Put zeros for the pairs that are elsewhere, and up to P."""
            filled = np.zeros((pairs, *values_P.shape[1:]), dtype or values_P.dtype)
            filled[: len(values_P)][here_P] = values_P[here_P]
            return filled

        def by_answer(values_D: np.ndarray) -> np.ndarray:
            filled_PK = np.zeros(self.shape, np.int32)
            filled_PK[pair_D[here_D], answer_D[here_D]] = values_D[here_D]
            return filled_PK

        return PackedRows(
            input_ids_RL,
            position_ids_RL,
            subtree_end_RL,
            last_row_PK=by_answer(row_of_tree[trees_D]),
            last_column_PK=by_answer(last_column_D),
            pair_mask_P=fill(here_P),
            tokens_P=fill(self.tokens_P, np.int32),
            labels={name: fill(values_P) for name, values_P in self.labels.items()},
            batch_pairs_1=np.array([weight / parts], np.float32),
            trees=trees,
        )


def up_to_scored(ids: np.ndarray, pad_token_id: int) -> np.ndarray:
    """Cut a dialogue after the token that is scored: the last that is not the pad token, or the first if all are."""
    if ids[-1] != pad_token_id:
        return ids
    others = np.flatnonzero(ids != pad_token_id)
    return ids[: others[-1] + 1] if len(others) else ids[:1]


def _choose(batch: _Batch, plan: RowPlan, expands: bool) -> tuple[Schedule, np.ndarray]:
    """Return the cheapest schedule that holds the batch, and each pair's row among all rows of it [P]."""
    sizes_P, shared_PP = tree_sizes(batch.order, batch.prefix_DD, batch.firsts_P)
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
