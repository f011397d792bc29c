"""Packed rows, from the packing of token ids to attention on a device: one class, one name for each tensor.

Packing makes them of numpy arrays, the collator maps these to torch tensors, and a loader those to tensors on the
device. `trl_tpu.packing.pack` and `trl_tpu.packing.expand` tell what the numbers mean.

Letters: P pairs, or prompts of ranked answers; K answers of each, 2 of a pair, the chosen one first; R rows, L length
of a row, 2 chosen and rejected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from .trie import Tree

Array = TypeVar("Array")  # numpy's while packing, torch's from the collator on
Other = TypeVar("Other")


class Expansion(NamedTuple, Generic[Array]):
    """Where the tokens of packed rows lie in expanded rows, int32: see `trl_tpu.packing.expand`."""

    gather_R2L: Array
    """The column of the packed row whose token is copied to each place; -1 for padding."""
    segment_R2L: Array
    """A number for each dialogue of a row; 0 for padding."""
    scatter_R2L: Array
    """The column that takes its output from each place; -1 where none does, as it has another copy or is padding."""
    inverse_RL: Array
    """For each token, the place in the two rows, flattened, that its output is taken from; -1 for padding."""


@dataclass(frozen=True)
class PackedRows(Generic[Array]):
    """The packed rows of one micro-batch: prefix trees that hold some or all pairs of a batch.

    Rows of one `RowShape` have tensors of the same shapes, whatever they hold. Padding columns hold the pad token at
    position 0 and see only themselves. Pairs of the batch that are not in these rows, and those that a short batch
    lacks, have a false `pair_mask_P`, last tokens (0, 0), no tokens and labels 0.
    """

    input_ids_RL: Array
    """Token ids, int32."""
    position_ids_RL: Array
    """The index of each token in its dialogue, int32."""
    subtree_end_RL: Array
    """Token q sees token k exactly when ``k <= q < subtree_end[k]``, int32."""
    last_row_PK: Array
    """The row of the token that scores each answer's dialogue, int32."""
    last_column_PK: Array
    """Its column, int32."""
    pair_mask_P: Array
    """True for the pairs in these rows."""
    tokens_P: Array
    """How many tokens the pair's dialogues have, as if nothing were shared, int32."""
    labels: dict[str, Array]
    """What the data says of each pair, [P, ...], such as its target `margin`: see `trl_tpu.data.judgements`."""
    batch_pairs_1: Array
    """How many real pairs, or how much weight, the whole batch has, [1], float32: what the loss is a mean over.

    In one of several processes it is their number a process: so the mean of all losses is that over the batch."""
    expansion: Expansion[Array] | None = None
    """Where the tokens lie in rows of whole dialogues, for models that attend there."""
    trees: tuple[Tree, ...] | None = None
    """Where the trees of an unpadded row lie, which attend one by one; None where whole rows are masked."""

    @property
    def last(self) -> tuple[Array, Array]:
        """The row and the column of the token that scores each dialogue, [P, K]."""
        return self.last_row_PK, self.last_column_PK

    def named_tensors(self) -> dict[str, Array]:
        """Return all tensors that are there by their fields' names."""
        own = {name: value for name, value in vars(self).items() if hasattr(value, "dtype")}
        return own | self.labels | ({} if self.expansion is None else self.expansion._asdict())

    def map_tensors(self, function: Callable[[Array], Other]) -> "PackedRows[Other]":
        """Return the same rows with ``function`` of each tensor in its place."""
        own: dict[str, Any] = {name: function(value) for name, value in vars(self).items() if hasattr(value, "dtype")}
        own["labels"] = {name: function(value) for name, value in self.labels.items()}
        expansion = None if self.expansion is None else Expansion(*map(function, self.expansion))
        return PackedRows(**{**vars(self), **own, "expansion": expansion})
