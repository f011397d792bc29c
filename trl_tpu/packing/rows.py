"""Rows of tokens as arrays."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..errors import UserError

Array = TypeVar("Array")  # numpy's while packing, torch's from the collator on


class Expansion(NamedTuple, Generic[Array]):
    """Where the tokens of packed rows lie in expanded rows, int32: see `expand_rows`."""

    gather_R2L: Array
    """The column of the packed row whose token is copied to each place; -1 for padding."""
    segment_R2L: Array
    """A number for each sequence of a row; 0 for padding."""
    scatter_R2L: Array
    """The column that takes its output from each place; -1 where none does, as it has another copy or is padding."""
    inverse_RL: Array
    """For each token, the place in the two rows, flattened, that its output is taken from; -1 for padding."""


class Arrays:
    """A dataclass that holds arrays, directly or in fields that are `Arrays` or an `Expansion`, and other values."""

    def tensors(self) -> dict[str, Any]:
        """Return all arrays by name."""
        found = dict[str, Any]()
        for name, value in vars(self).items():
            if isinstance(value, Arrays | Expansion):
                found |= value.tensors() if isinstance(value, Arrays) else value._asdict()
            elif hasattr(value, "dtype"):
                found[name] = value
        return found

    def map_tensors(self, function: Callable[[Any], Any]) -> Any:
        """Return a copy with ``function`` of each array."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Arrays):
                return value.map_tensors(function)
            if isinstance(value, Expansion):
                return Expansion(*map(function, value))
            return function(value) if hasattr(value, "dtype") else value

        own: Any = self
        return replace(own, **{field.name: mapped(getattr(self, field.name)) for field in fields(own)})


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens that a sequence adds to its tree: they see their path, and one another in order."""

    start: int
    """Their first column, counted from the tree's."""
    stop: int
    path: tuple[tuple[int, int], ...]
    """The columns before them in their sequence, as ranges counted from the tree's first."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Where a tree lies in its row."""

    start: int
    stop: int
    tails: tuple[Tail, ...]
    """Its tokens in order. A tree that does not branch has one tail."""


@dataclass(frozen=True)
class TokenRows(Arrays, Generic[Array]):
    """Rows of tokens and the positions in them where rewards are read.

    Packed rows hold prefix trees of several sequences. Padded rows hold one sequence each, and have an
    `attention_mask_RL` instead of `position_ids_RL` and `subtree_end_RL`.
    """

    input_ids_RL: Array
    """Token ids. Padding columns hold the pad token."""
    score_row_S: Array
    """The row of the token at which each reward is read, int32; 0 where there is no reward."""
    score_column_S: Array
    """Its column."""
    tokens_S: Array
    """Tokens that each reward adds to those before it in its row of the data, as if nothing were shared, int32.

    0 where there is no reward in these rows."""
    position_ids_RL: Array | None = None
    """Index of each token in its sequence, int32."""
    subtree_end_RL: Array | None = None
    """Token q attends to token k exactly when ``k <= q < subtree_end[k]``, int32."""
    attention_mask_RL: Array | None = None
    """1 for tokens, 0 for padding."""
    expansion: Expansion[Array] | None = None
    """Where the tokens lie in rows of whole sequences, for models that attend there."""
    trees: tuple[Tree, ...] | None = None
    """Where the trees of an unpadded row lie, which attend one by one; None where whole rows are masked."""

    @property
    def is_packed(self) -> bool:
        return self.subtree_end_RL is not None


def expand_rows(packed: TokenRows[np.ndarray]) -> Expansion[np.ndarray]:
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
