"""From packed rows to plain ones and back: where each token of a sequence lies in each. numpy only.

Attention kernels know rows of whole sequences, one after the other, and not trees. So inside attention a packed row is
expanded into two rows of its own length: one with its pairs' chosen sequences, one with the rejected ones. A token
that several sequences share is copied to each, and takes its output from one of the copies, which are all equal.

Letters: P pairs, D sequences, T tokens of all sequences, M tokens without repetition, R rows, L length of a row,
2 chosen and rejected.
"""

import numpy as np

from ..errors import UserError
from .rows import Expansion, TokenRows


def expand_rows(packed: TokenRows[np.ndarray]) -> Expansion[np.ndarray]:
    """Lay out the sequences of packed rows one after the other.

    A sequence's tokens are contiguous and in order, so that indices count positions within it.

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
