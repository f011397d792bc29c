"""Packs the sequences of one batch into rows of planned shapes, for a device that compiles each."""

from dataclasses import replace

import numpy as np

from ..errors import UserError
from .batch import Batch, Expansion
from .pack import Sequences
from .shapes import RowPlan, RowShape, Schedule, zigzag

# A token saved by sharing is saved for sure; a row filled more tightly only may save one later.
_TOKENS_PER_FREE_TOKEN = 4


def pack(
    sequences: Sequences, plan: RowPlan, expands: bool = False, part: tuple[int, int] = (0, 1)
) -> list[Batch[np.ndarray]]:
    """Pack one batch by the cheapest schedule of ``plan`` that holds it.

    Args:
        sequences: At least one sequence.
        plan: From `plan_rows`.
        expands: Whether attention reads rows of whole sequences: then the rows have their `expansion`, and pairs share
            a row only if their chosen sequences, one after the other, fit into its length, and the rejected ones too.
        part: Which rows of each micro-batch to write, the first having (0, count). The parts of all are its rows.

    Returns:
        The micro-batches in order; the last one updates.

    Raises:
        UserError: If a pair is longer than the longest row, or the batch fits no shape.
    """
    sequences = replace(sequences, chunk=plan.chunk)
    schedule, row_P = _choose(sequences, plan, expands)
    (index, count), micro_batches, before = part, list[Batch[np.ndarray]](), 0
    for shape in schedule:
        own = RowShape(shape.rows // count, shape.length)
        row_D = row_P[sequences.pair_D] - before - index * own.rows
        row_D[row_D >= own.rows] = -1
        written = sequences.written(row_D, row_D, own)  # one tree a row
        micro_batches.append(replace(written, trees=None, expansion=expand_rows(written) if expands else None))
        before += shape.rows
    return micro_batches


def _tree_sizes(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return the size of each pair's trie [P], and how many tokens the tries of any two pairs share [P, P]."""
    pair_D, (order, prefix_DD) = sequences.pair_D, sequences.prefixes
    firsts_P = np.searchsorted(pair_D, np.arange(pair_D[-1] + 1))
    by_pair_D = order[np.argsort(pair_D[order], kind="stable")]  # pair by pair, each in lexicographic order
    one_D, next_D = by_pair_D[:-1], by_pair_D[1:]
    common_D = np.where(pair_D[one_D] == pair_D[next_D], prefix_DD[one_D, next_D], 0)
    in_trie_DP = np.maximum.reduceat(prefix_DD, firsts_P, axis=1)[by_pair_D]  # first tokens that are in a trie
    before_DP = np.minimum(np.minimum(in_trie_DP[:-1], in_trie_DP[1:]), common_D[:, None])
    shared_PP = np.add.reduceat(in_trie_DP, firsts_P, axis=0)
    shared_PP -= np.add.reduceat(np.pad(before_DP, ((0, 1), (0, 0))), firsts_P, axis=0)
    return shared_PP.diagonal().copy(), shared_PP


def _choose(sequences: Sequences, plan: RowPlan, expands: bool) -> tuple[Schedule, np.ndarray]:
    """Return the cheapest schedule that holds the batch, and each pair's row among all rows of it [P]."""
    sizes_P, shared_PP = _tree_sizes(sequences)
    lengths_D, (order, prefix_DD) = np.array(list(map(len, sequences.cut))), sequences.prefixes
    lengths_P2 = lengths_D.reshape(-1, 2) if expands else None
    fewest = lengths_D.sum() - prefix_DD[order[:-1], order[1:]].sum()  # in one trie
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


def expand_rows(packed: Batch[np.ndarray]) -> Expansion[np.ndarray]:
    """Lay out the sequences of packed rows one after the other.

    Each packed row has two expanded rows, one for its chosen and one for its rejected sequences. A sequence's tokens
    are contiguous and in order, so that indices count positions within it.

    Raises:
        UserError: If the chosen or the rejected sequences of a row are together longer than the row. It takes pairs
            that share tokens with other pairs: a pair's own tokens always make room for either of its sequences.
    """
    assert packed.subtree_end_RL is not None  # of packed rows
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
        raise UserError(f"The chosen or the rejected sequences of a row have {longest} tokens, but it has {length}.")

    # where each token lies: in all expanded rows, flattened, and in all packed ones
    first_D = np.searchsorted(sequence_T, np.searchsorted(half_D, half_D))  # where the sequence's half begins
    place_T = (half_D * length - first_D)[sequence_T] + np.arange(len(sequence_T))
    token_T = (half_D // 2 * length)[sequence_T] + column_T
    gather = np.full(2 * rows * length, -1, np.int32)
    scatter, segment, inverse = gather.copy(), np.zeros_like(gather), np.full(rows * length, -1, np.int32)
    gather[place_T] = column_T
    segment[place_T] = sequence_T + 1
    inverse[token_T] = place_T  # the last of several
    token_M = np.flatnonzero(inverse >= 0)
    scatter[inverse[token_M]] = token_M % length
    inverse[token_M] -= (token_M // length * 2 * length).astype(np.int32)
    gather, segment, scatter = (index.reshape(rows, 2, length) for index in (gather, segment, scatter))
    return Expansion(gather, segment, scatter, inverse.reshape(rows, length))
