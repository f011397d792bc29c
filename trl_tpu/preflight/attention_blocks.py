"""What the attention kernel computes, which the program does not say: its blocks are chosen batch by batch.

See `trl_tpu.runtime.kernels.splash`: of a block of queries with a block of keys all is computed if a needed query and
a key in them belong to one dialogue. numpy only.
"""

from math import ceil

import numpy as np

from ..runtime.kernels.blocks import block_size, padded, padded_head
from .case import Case
from .lengths import PairLengths


def kernel_flops(case: Case) -> float:
    """Operations of a step's attention kernels over all chips; 0 where masks are used instead.

    A block takes a product of queries with keys and one of weights with values; with full remat again in the backward;
    then for gradients seven, in two kernels that both begin with the weights.
    """
    return _operations(case, *map(padded_head, case.model.head_dims))


def kernel_unit_flops(case: Case) -> float:
    """The operations that a chip's arithmetic units could do while they compute the kernels.

    They are as wide as vectors, and heads that are not leave a part of them empty.
    """
    return _operations(case, *map(padded, case.model.head_dims))


def _operations(case: Case, keys: int, values: int) -> float:
    if case.masks:
        return 0.0
    model, block = case.model, block_size(case.length)
    forwards = 2 if case.remat == "full" else 1
    sizes = forwards * (keys + values) + 4 * keys + 3 * values
    blocks = {window: blocks_run(case.lengths, case.rows, case.length, window) for window in set(model.windows)}
    return sum(2.0 * model.heads * block * block * sizes * blocks[window] for window in model.windows)


def blocks_run(pairs: PairLengths, rows: int, length: int, window: int | None = None) -> int:
    """How many blocks are computed of one head, for pairs that are dealt out over packed rows, the largest first."""
    members: list[list[int]] = [[] for _ in range(rows)]
    filled_R = np.zeros(rows, np.int64)
    for pair in np.argsort(-pairs.sizes_P, kind="stable"):
        row = int(filled_R.argmin())
        members[row].append(int(pair))
        filled_R[row] += pairs.sizes_P[pair]
    return sum(
        _blocks_of(pairs.prefix_P[chosen], tail_P[chosen], length, window, is_second)
        for chosen in members
        for tail_P, is_second in ((pairs.chosen_P, False), (pairs.rejected_P, True))
    )


def _blocks_of(prefix_D: np.ndarray, tail_D: np.ndarray, length: int, window: int | None, with_prefix: bool) -> int:
    """Of one expanded row. A prefix is in two of them, and needed in the second."""
    block = block_size(length)
    columns = ceil(length / block) * block
    segment_L, needed_L = np.zeros(columns, np.int64), np.zeros(columns, bool)
    dialogues = np.repeat(np.arange(len(prefix_D)) + 1, prefix_D + tail_D)[:columns]
    is_tail = np.concatenate([np.arange(a + b) >= a for a, b in zip(prefix_D, tail_D, strict=True)] or [[]])[:columns]
    segment_L[: len(dialogues)] = dialogues
    needed_L[: len(dialogues)] = is_tail.astype(bool) | with_prefix
    segment_Nb, needed_Nb = segment_L.reshape(-1, block), needed_L.reshape(-1, block)
    first_N = np.where(needed_Nb, segment_Nb, length + 1).min(1)
    last_N = np.where(needed_Nb, segment_Nb, -1).max(1)
    meets_NN = (first_N[:, None] <= segment_Nb.max(1)) & (segment_Nb.min(1) <= last_N[:, None])
    number_N = np.arange(len(first_N))
    behind_NN = number_N[:, None] - number_N
    sees_NN = behind_NN >= 0
    if window is not None:
        sees_NN &= behind_NN * block < window + block - 1
    return int((meets_NN & sees_NN).sum())


__all__ = ["blocks_run", "kernel_flops", "kernel_unit_flops"]
