"""From packed rows to plain ones and back: where each token of a dialogue lies in each. numpy only.

Attention kernels know rows of whole dialogues, one after the other, and not trees. So inside attention a packed row is
expanded into two rows of its own length: one with its pairs' chosen dialogues, one with the rejected ones. A token
that several dialogues share is copied to each, and takes its output from one of the copies, which are all equal.

Letters: P pairs, D dialogues, T tokens of all dialogues, M tokens without repetition, R rows, L length of a row,
2 chosen and rejected.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Expansion:
    """Where the tokens of packed rows lie in the expanded rows, int32.

    A dialogue's tokens are contiguous and in order, so that indices count positions within it.
    """

    expand_R2L: np.ndarray
    """The column of the packed row whose token is copied to each place; -1 for padding."""
    segment_R2L: np.ndarray
    """A number for each dialogue of a row; 0 for padding."""
    home_R2L: np.ndarray
    """The column that takes its output from each place; -1 where none does, as it has another copy or is padding."""
    back_RL: np.ndarray
    """For each token, the place in the two rows, flattened, that its output is taken from; -1 for padding."""


def expand_rows(
    subtree_end_RL: np.ndarray, last_row_P2: np.ndarray, last_column_P2: np.ndarray, pair_mask_P: np.ndarray
) -> Expansion:
    """Lay out the dialogues of packed rows one after the other.

    Args:
        subtree_end_RL, last_row_P2, last_column_P2, pair_mask_P: See `trl_tpu.packing.pack.PackedPass`.

    Raises:
        ValueError: If the chosen or the rejected dialogues of a row are together longer than the row. It takes pairs
            that share tokens with other pairs: a pair's own tokens always make room for either of its dialogues.
    """
    rows, length = subtree_end_RL.shape
    half_D = (last_row_P2[pair_mask_P] * 2 + [0, 1]).T.ravel()
    order = np.argsort(half_D, kind="stable")
    half_D, last_D = half_D[order], last_column_P2[pair_mask_P].T.ravel()[order]

    sees_DL = subtree_end_RL[half_D // 2] > last_D[:, None]
    sees_DL &= np.arange(length) <= last_D[:, None]
    dialogue_T, column_T = np.nonzero(sees_DL)
    _check_fit(np.bincount(half_D[dialogue_T], minlength=2 * rows), length)

    # where each token lies: in all expanded rows, flattened, and in all packed ones
    first_D = np.searchsorted(dialogue_T, np.searchsorted(half_D, half_D))  # where the dialogue's half begins
    place_T = (half_D * length - first_D)[dialogue_T] + np.arange(len(dialogue_T))
    token_T = (half_D // 2 * length)[dialogue_T] + column_T
    expand = np.full(2 * rows * length, -1, np.int32)
    home, segment, back = expand.copy(), np.zeros_like(expand), np.full(rows * length, -1, np.int32)
    expand[place_T] = column_T
    segment[place_T] = dialogue_T + 1
    back[token_T] = place_T  # the last of several
    token_M = np.flatnonzero(back >= 0)
    home[back[token_M]] = token_M % length
    back[token_M] -= (token_M // length * 2 * length).astype(np.int32)
    in_halves = (rows, 2, length)
    return Expansion(
        expand.reshape(in_halves), segment.reshape(in_halves), home.reshape(in_halves), back.reshape(rows, length)
    )


def _check_fit(tokens: np.ndarray, length: int) -> None:
    if tokens.max() > length:
        row, half = divmod(int(tokens.argmax()), 2)
        raise ValueError(
            f"The {('chosen', 'rejected')[half]} dialogues of packed row {row} have {tokens.max()} tokens, but the "
            f"row has {length} columns: its pairs share tokens with each other. To expand rows for attention, pack so "
            "that the chosen dialogues of a row fit into its length, and the rejected ones too."
        )
