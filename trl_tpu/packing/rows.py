"""Rows of tokens, from packing to attention on a device: one class, one name for each tensor.

Packing makes them of numpy arrays, the collator maps these to torch tensors, and a loader those to tensors on the
device. `trl_tpu.packing.pack` and `trl_tpu.packing.expand` tell what the numbers of packed rows mean.

Letters: P rows of the data in a batch, K answers of each, S = P K scored positions, R rows of tokens, L their length,
2 chosen and rejected.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from .trie import Tree

Array = TypeVar("Array")  # numpy's while packing, torch's from the collator on


class Expansion(NamedTuple, Generic[Array]):
    """Where the tokens of packed rows lie in expanded rows, int32: see `trl_tpu.packing.expand`."""

    gather_R2L: Array
    """The column of the packed row whose token is copied to each place; -1 for padding."""
    segment_R2L: Array
    """A number for each sequence of a row; 0 for padding."""
    scatter_R2L: Array
    """The column that takes its output from each place; -1 where none does, as it has another copy or is padding."""
    inverse_RL: Array
    """For each token, the place in the two rows, flattened, that its output is taken from; -1 for padding."""


@dataclass(frozen=True)
class TokenRows(Generic[Array]):
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

    def tensors(self) -> dict[str, Array]:
        """Return all tensors that are there by name."""
        own = {name: value for name, value in vars(self).items() if hasattr(value, "dtype")}
        return own | ({} if self.expansion is None else self.expansion._asdict())

    def map_tensors(self, function: Callable[[Any], Any]) -> "TokenRows[Any]":
        """Return the same rows with ``function`` of each tensor."""
        own = {name: function(value) for name, value in vars(self).items() if hasattr(value, "dtype")}
        expansion = None if self.expansion is None else Expansion(*map(function, self.expansion))
        return replace(self, **own, expansion=expansion)
