"""Packs the sequences of one batch into rows of planned shapes, for devices that compile once per shape."""

from dataclasses import replace

import numpy as np

from ..errors import UserError
from .batch import Batch, Expansion
from .pack import Sequences
from .shapes import RowPlan, RowShape, Schedule, zigzag

# A shared token saves work for certain; a tighter fit only may save work for later pairs. So sharing weighs more.
_SHARING_WEIGHT = 4


def pack(
    sequences: Sequences, plan: RowPlan, expands: bool = False, part: tuple[int, int] = (0, 1)
) -> list[Batch[np.ndarray]]:
    """Pack one batch by the cheapest schedule of ``plan`` that it fits into.

    Args:
        sequences: At least one sequence.
        plan: Row shapes from `plan_rows`.
        expands: Whether attention reads rows of whole sequences. The batch then gets an `expansion`, and pairs share a
            row only if all their chosen sequences together fit into its length, and all rejected sequences too.
        part: (index, count): write only the index-th of count equal parts of each micro-batch's rows.

    Returns:
        The micro-batches in order. The last one ends the batch with an update.

    Raises:
        UserError: If a pair is longer than the longest row, or the batch fits no shape.
    """
    sequences = replace(sequences, chunk=plan.chunk)
    schedule, row_P = _choose(sequences, plan, expands)
    (index, count), micro_batches, before = part, list[Batch[np.ndarray]](), 0
    for shape in schedule:
        part_shape = RowShape(shape.rows // count, shape.length)
        row_D = row_P[sequences.pair_D] - before - index * part_shape.rows
        row_D[row_D >= part_shape.rows] = -1
        written = sequences.written(row_D, row_D, part_shape)  # one tree per row
        micro_batches.append(replace(written, trees=None, expansion=expand_rows(written) if expands else None))
        before += shape.rows
    return micro_batches


def _tree_sizes(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return the size of each pair's prefix tree [P], and the number of tokens that any two trees share [P, P]."""
    pair_D, (order, prefix_DD) = sequences.pair_D, sequences.prefixes
    firsts_P = np.searchsorted(pair_D, np.arange(pair_D[-1] + 1))
    by_pair_D = order[np.argsort(pair_D[order], kind="stable")]  # sorted by pair, then lexicographically
    left_D, right_D = by_pair_D[:-1], by_pair_D[1:]
    common_D = np.where(pair_D[left_D] == pair_D[right_D], prefix_DD[left_D, right_D], 0)
    # leading tokens that are in each pair's tree
    in_tree_DP = np.maximum.reduceat(prefix_DD, firsts_P, axis=1)[by_pair_D]
    before_DP = np.minimum(np.minimum(in_tree_DP[:-1], in_tree_DP[1:]), common_D[:, None])
    shared_PP = np.add.reduceat(in_tree_DP, firsts_P, axis=0)
    shared_PP -= np.add.reduceat(np.pad(before_DP, ((0, 1), (0, 0))), firsts_P, axis=0)
    return shared_PP.diagonal().copy(), shared_PP


def _choose(sequences: Sequences, plan: RowPlan, expands: bool) -> tuple[Schedule, np.ndarray]:
    """Return the cheapest schedule that the batch fits into, and the row of each pair in the schedule [P]."""
    sizes_P, shared_PP = _tree_sizes(sequences)
    lengths_D, (order, prefix_DD) = np.array(list(map(len, sequences.cut))), sequences.prefixes
    lengths_P2 = lengths_D.reshape(-1, 2) if expands else None
    fewest = lengths_D.sum() - prefix_DD[order[:-1], order[1:]].sum()  # tokens if all sequences were in one tree
    if sizes_P.max() > plan.longest:
        pair = int(sizes_P.argmax())
        raise UserError(
            f"Pair {pair} of the batch takes {sizes_P[pair]} tokens (both sequences, their common prefix once), but "
            f"the longest planned row has {plan.longest}. Pairs are never split: include this pair's size when you "
            "plan the shapes, or drop long sequences with `max_length`."
        )
    for schedule in plan.schedules():
        lengths_R = np.array([shape.length for shape in schedule for _ in range(shape.rows)])
        if lengths_R.sum() < fewest or lengths_R.max() < sizes_P.max():
            continue
        row_P = _place(sizes_P, shared_PP, lengths_P2, lengths_R)
        if row_P is not None:
            return schedule, row_P
    # Best fit can fail even if the last shape is large enough. `zigzag` cannot fail: the shape was planned with it.
    last = plan.update[-1]
    row_P = np.empty(len(sizes_P), np.int64)
    row_P[np.argsort(-sizes_P, kind="stable")] = zigzag(len(sizes_P), last.rows)
    if np.bincount(row_P, sizes_P).max() > last.length:
        raise UserError(
            f"A batch of {len(sizes_P)} pairs with {sizes_P.sum()} tokens fits none of the planned shapes "
            f"{plan}. Include the sizes of these pairs when you plan the shapes."
        )
    return (last,), row_P


def _place(
    sizes_P: np.ndarray, shared_PP: np.ndarray, lengths_P2: np.ndarray | None, lengths_R: np.ndarray
) -> np.ndarray | None:
    """Place pairs by best fit, largest first, and return each pair's row [P]; None if they do not fit.

    A pair adds at most its size minus the largest number of tokens shared with a single pair of that row. The row's
    tree may share more. With ``lengths_P2``, both sequences also need unshared room in expanded rows.
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
        score_R = free_R + _SHARING_WEIGHT * added_R
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


def expand_rows(packed: Batch[np.ndarray]) -> Expansion[np.ndarray]:
    """Map the tokens of packed rows to expanded rows with contiguous sequences.

    Each packed row has two expanded rows, one for its chosen and one for its rejected sequences. In an expanded row,
    two tokens of a sequence are as many columns apart as in the sequence. Sliding windows need that.

    Raises:
        UserError: If the chosen or the rejected sequences of a row are together longer than the row. This can happen
            only if pairs share tokens with other pairs: either sequence of a pair fits into the pair's own tokens.
    """
    assert packed.subtree_end_RL is not None  # packed rows have it
    rows, length = packed.subtree_end_RL.shape
    here_P = packed.tokens_S.reshape(-1, 2)[:, 0] > 0
    half_D = (packed.score_row_S.reshape(-1, 2)[here_P] * 2 + [0, 1]).T.ravel()
    order = np.argsort(half_D, kind="stable")
    half_D, last_D = half_D[order], packed.score_column_S.reshape(-1, 2)[here_P].T.ravel()[order]

    sees_DL = packed.subtree_end_RL[half_D // 2] > last_D[:, None]
    sees_DL &= np.arange(length) <= last_D[:, None]
    sequence_T, column_T = np.nonzero(sees_DL)
    longest = np.bincount(half_D[sequence_T], minlength=2 * rows).max()
    if longest > length:
        raise UserError(
            f"The chosen or the rejected sequences of a row have {longest} tokens, but the row has {length} columns."
        )

    # index of each token in the flattened expanded rows, and in the flattened packed rows
    # first token in the sequence's expanded row
    first_D = np.searchsorted(sequence_T, np.searchsorted(half_D, half_D))
    place_T = (half_D * length - first_D)[sequence_T] + np.arange(len(sequence_T))
    token_T = (half_D // 2 * length)[sequence_T] + column_T
    gather = np.full(2 * rows * length, -1, np.int32)
    scatter, segment, inverse = gather.copy(), np.zeros_like(gather), np.full(rows * length, -1, np.int32)
    gather[place_T] = column_T
    segment[place_T] = sequence_T + 1
    inverse[token_T] = place_T  # of several copies, the last one gives the output
    token_M = np.flatnonzero(inverse >= 0)
    scatter[inverse[token_M]] = token_M % length
    inverse[token_M] -= (token_M // length * 2 * length).astype(np.int32)
    gather, segment, scatter = (index.reshape(rows, 2, length) for index in (gather, segment, scatter))
    return Expansion(gather, segment, scatter, inverse.reshape(rows, length))
