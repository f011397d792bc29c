"""Token pairs of one batch as packed rows: every shared prefix once, in one of a few fixed shapes. numpy only.

The dialogues of a row form a trie. Written depth first, with the dialogues in lexicographic order, each dialogue adds
the tokens that its predecessor does not share, so a pair becomes ``prefix | one tail | other tail``, and pairs that
share their prompt, or only a system prompt, share its tokens too. A position id is the depth in the trie, which is the
token's index in its own dialogue. One integer a token says who sees whom: ``subtree_end[k]`` is the column where the
tokens that continue k's text end, and the token in column q sees the one in k exactly when
``k <= q < subtree_end[k]``. That also isolates pairs that only share a row.

Rows and devices: of R rows on S shards, row r belongs to shard ``r // (R / S)``. A pair lies whole in one row, and any
row may hold any pair: `last_row_P2` and `last_column_P2` address the whole batch, in the batch's own order of pairs.
All rows have the same length and a device computes all of it, so devices have equal work whatever their rows hold.
With several hosts each host packs the whole batch, which is deterministic, and keeps its own slice of rows and pairs.

Letters: B batches, P pairs, D dialogues (2P: chosen, rejected, chosen, ...), R rows, L length of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .row_shapes import RowShape, snake

# A token saved by sharing is saved for sure; a row filled more tightly only may save one later.
_TOKENS_PER_FREE_TOKEN = 4


@dataclass(frozen=True)
class PackedBatch:
    """One batch in packed rows. All arrays have the same shapes in every batch of the same planned shape.

    Padding columns hold the pad token at position 0 and see only themselves. A short batch has pairs that are not
    real: their `pair_mask_P` is false, their last tokens are all (0, 0) and their margin is 0.
    """

    input_ids_RL: np.ndarray
    """Token ids, int32."""
    position_ids_RL: np.ndarray
    """The index of each token in its dialogue, int32."""
    subtree_end_RL: np.ndarray
    """Token q sees token k exactly when ``k <= q < subtree_end[k]``, int32."""
    last_row_P2: np.ndarray
    """The row of the token that scores the chosen and the rejected dialogue, int32."""
    last_column_P2: np.ndarray
    """Its column, int32."""
    pair_mask_P: np.ndarray
    """True for real pairs."""
    tokens_P: np.ndarray
    """How many tokens the pair's two dialogues have, as if nothing were shared, int32."""
    margin_P: np.ndarray | None
    """The target margin, float32; None where the data has none."""


def pack(
    chosen: Sequence[Sequence[int]],
    rejected: Sequence[Sequence[int]],
    shapes: Sequence[RowShape],
    pairs: int,
    pad_token_id: int,
    margins: Sequence[float] | None = None,
) -> PackedBatch:
    """Pack one batch into the first of ``shapes`` that it fits.

    A dialogue is scored at its last token that is not the pad token, as transformers does; later tokens, which exist
    only where texts contain the pad token, cannot influence that score and are left out.

    Args:
        chosen: Token ids of the chosen dialogue of each pair.
        rejected: Token ids of the rejected one.
        shapes: From `plan_shapes`, in its order.
        pairs: P. A batch may have fewer, but not more.
        pad_token_id: Fills what rows have left.
        margins: The target margin of each pair.

    Raises:
        ValueError: If a pair is longer than the longest row, a dialogue is empty, or the batch fits no shape.
    """
    count = len(chosen)
    _check_counts(count, len(rejected), pairs)
    whole = [np.asarray(ids, np.int32) for pair in zip(chosen, rejected, strict=True) for ids in pair]
    dialogues = [_up_to_scored(ids, pad_token_id, index) for index, ids in enumerate(whole)]
    order, common_DD = _common_prefixes(dialogues)
    sizes_P, shared_PP = _tree_sizes(common_DD)
    shape, rows_P = _choose(sizes_P, shared_PP, shapes)

    input_ids_RL, position_ids_RL, subtree_end_RL, last_column_D = _lay_out(
        dialogues, np.repeat(rows_P, 2), order, common_DD, shape, pad_token_id
    )
    return PackedBatch(
        input_ids_RL,
        position_ids_RL,
        subtree_end_RL,
        last_row_P2=_fill(np.repeat(rows_P[:, None], 2, axis=1), pairs, np.int32),
        last_column_P2=_fill(last_column_D.reshape(-1, 2), pairs, np.int32),
        pair_mask_P=np.arange(pairs) < count,
        tokens_P=_fill([len(ids) + len(other) for ids, other in zip(chosen, rejected, strict=True)], pairs, np.int32),
        margin_P=None if margins is None else _fill(margins, pairs, np.float32),
    )


def pair_size(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """How many tokens a pair takes in a row: both dialogues, with their common prefix counted once."""
    return len(chosen) + len(rejected) - _common_prefix(np.asarray(chosen), np.asarray(rejected))


def _check_counts(chosen: int, rejected: int, pairs: int) -> None:
    if chosen != rejected:
        raise ValueError(f"A pair has a chosen and a rejected dialogue, got {chosen} chosen and {rejected} rejected.")
    if not 1 <= chosen <= pairs:
        raise ValueError(f"Shapes were planned for batches of 1 to {pairs} pairs, got {chosen}. Plan them anew.")


def _up_to_scored(ids: np.ndarray, pad_token_id: int, index: int) -> np.ndarray:
    """A dialogue up to the token that is scored: the last that is not the pad token, or the first if all are."""
    if not len(ids):
        half = ("chosen", "rejected")[index % 2]
        raise ValueError(f"The {half} dialogue of pair {index // 2} of the batch has no tokens that could be scored.")
    if ids[-1] != pad_token_id:
        return ids
    others = np.flatnonzero(ids != pad_token_id)
    return ids[: others[-1] + 1] if len(others) else ids[:1]


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _common_prefixes(dialogues: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The dialogues' lexicographic order [D], and the length of the common prefix of any two [D, D].

    The common prefix of two is the shortest common prefix of neighbours between them in lexicographic order.
    """
    as_bytes = [ids.astype(">u4").tobytes() for ids in dialogues]  # compared byte by byte, these sort as the ids do
    order = np.array(sorted(range(len(dialogues)), key=as_bytes.__getitem__))
    neighbours = [
        _common_prefix(dialogues[one], dialogues[other]) for one, other in zip(order, order[1:], strict=False)
    ]
    by_rank_DD = np.diag([len(dialogues[index]) for index in order])
    for rank in range(len(order) - 1):
        by_rank_DD[rank, rank + 1 :] = np.minimum.accumulate(neighbours[rank:])
    by_rank_DD = np.maximum(by_rank_DD, by_rank_DD.T)
    common_DD = np.empty_like(by_rank_DD)
    common_DD[np.ix_(order, order)] = by_rank_DD
    return order, common_DD


def _tree_sizes(common_DD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The size of each pair's trie [P], and how many tokens any two pairs' tries have in common [P, P]."""
    count = len(common_DD) // 2
    common_P2P2 = common_DD.reshape(count, 2, count, 2)
    each = np.arange(count)
    prefix_P = common_P2P2[each, 0, each, 1]
    sizes_P = common_P2P2[each, 0, each, 0] + common_P2P2[each, 1, each, 1] - prefix_P
    chosen_PP, rejected_PP = common_P2P2.max(axis=3).swapaxes(0, 1)
    in_both_PP = np.minimum(np.minimum(chosen_PP, rejected_PP), prefix_P[:, None])
    return sizes_P, chosen_PP + rejected_PP - in_both_PP


def _choose(sizes_P: np.ndarray, shared_PP: np.ndarray, shapes: Sequence[RowShape]) -> tuple[RowShape, np.ndarray]:
    """The first shape that holds the batch, and each pair's row [P]."""
    longest = max(shape.length for shape in shapes)
    if sizes_P.max() > longest:
        pair = int(sizes_P.argmax())
        raise ValueError(
            f"Pair {pair} of the batch takes {sizes_P[pair]} tokens (both dialogues, their common prefix once), but "
            f"the longest planned row has {longest}. Pairs are never cut: plan the shapes with this pair's size among "
            "them, or leave out long dialogues with `max_length`."
        )
    for shape in shapes:
        rows_P = _place(sizes_P, shared_PP, shape)
        if rows_P is not None:
            return shape, rows_P
    # Best fit may fail by bad luck where a plain deal, by which the last shape was made, cannot.
    rows_P = np.empty(len(sizes_P), np.int64)
    rows_P[np.argsort(-sizes_P, kind="stable")] = snake(len(sizes_P), shapes[-1].rows)
    if np.bincount(rows_P, sizes_P).max() > shapes[-1].length:
        raise ValueError(
            f"A batch of {len(sizes_P)} pairs with {sizes_P.sum()} tokens fits none of the planned shapes "
            f"{', '.join(map(str, shapes))}. Plan the shapes with the sizes of these pairs among them."
        )
    return shapes[-1], rows_P


def _place(sizes_P: np.ndarray, shared_PP: np.ndarray, shape: RowShape) -> np.ndarray | None:
    """Best fit, the largest pair first: each pair's row [P], or None where they do not fit.

    What a pair adds to a row is its size less what it shares with the pair in that row that it shares most with; the
    trie may save more, never less.
    """
    if sizes_P.max() > shape.length:
        return None
    free_R = np.full(shape.rows, shape.length)
    shared_RP = np.zeros((shape.rows, len(sizes_P)), shared_PP.dtype)
    rows_P = np.empty(len(sizes_P), np.int64)
    for pair in np.argsort(-sizes_P, kind="stable"):
        added_R = sizes_P[pair] - shared_RP[:, pair]
        score_R = free_R + _TOKENS_PER_FREE_TOKEN * added_R
        score_R[added_R > free_R] = np.iinfo(np.int64).max
        row = score_R.argmin()
        if added_R[row] > free_R[row]:
            return None
        rows_P[pair] = row
        free_R[row] -= added_R[row]
        np.maximum(shared_RP[row], shared_PP[pair], out=shared_RP[row])
    return rows_P


def _lay_out(
    dialogues: list[np.ndarray],
    rows_D: np.ndarray,
    order: np.ndarray,
    common_DD: np.ndarray,
    shape: RowShape,
    pad_token_id: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Write each row's trie depth first: input ids, position ids, subtree ends [R, L], last columns [D]."""
    rows, length = shape.rows, shape.length
    columns = np.arange(max(length, max(map(len, dialogues))), dtype=np.int32)
    input_ids_RL = np.full((rows, length), pad_token_id, np.int32)
    position_ids_RL = np.zeros((rows, length), np.int32)
    subtree_end_RL = np.tile(columns[:length] + 1, (rows, 1))
    last_column_D = np.zeros(len(dialogues), np.int32)

    path = np.zeros_like(columns)  # by depth, the column of the current dialogue's token
    written = []  # (row, depth where its own tokens start, its length, first column, column after its last)
    before, stop = -1, 0
    for index in order[np.argsort(rows_D[order], kind="stable")]:
        row, ids = rows_D[index], dialogues[index]
        same_row = before >= 0 and rows_D[before] == row
        depth, start = (common_DD[before, index], stop) if same_row else (0, 0)
        stop = start + len(ids) - depth
        input_ids_RL[row, start:stop] = ids[depth:]
        position_ids_RL[row, start:stop] = columns[depth : len(ids)]
        path[depth : len(ids)] = columns[start:stop]
        last_column_D[index] = path[len(ids) - 1]
        written.append((row, depth, len(ids), start, stop))
        before = index

    ends = np.zeros_like(columns)  # by depth, where the subtree of a token at that depth ends
    after = -1
    for row, depth, size, start, stop in reversed(written):
        if row != after:
            ends[:] = stop
        subtree_end_RL[row, start:stop] = ends[depth:size]
        ends[depth:] = start
        after = row
    return input_ids_RL, position_ids_RL, subtree_end_RL, last_column_D


def _fill(values: Sequence[float] | np.ndarray, pairs: int, dtype: type) -> np.ndarray:
    """Values of the real pairs, then zeros up to ``pairs``."""
    array: np.ndarray = np.asarray(values, dtype)
    return np.concatenate([array, np.zeros((pairs - len(array), *array.shape[1:]), dtype)])
