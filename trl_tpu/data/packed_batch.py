"""A batch of pairs as a collator hands it on in packed rows: the micro-batches that it is computed in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..packing.rows import Expansion, Movable, PackedRows


@dataclass(frozen=True)
class PackedBatch(Movable):
    """All micro-batches of one batch. Their losses, and so their gradients, add up to the batch's."""

    micro_batches: tuple[PackedRows[torch.Tensor], ...]
    """In order: all but the last only accumulate gradients, and the last also updates."""
    pair_mask_P: torch.Tensor
    """True for the real pairs of the batch, which a short one has fewer of."""

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
        return PackedBatch(
            tuple(rows.map_tensors(function) for rows in self.micro_batches), function(self.pair_mask_P)
        )


def micro_batches_of(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Split what a collator gave into what is computed at a time, in order; a padded batch is one micro-batch."""
    packed = inputs.get("packed")
    if not isinstance(packed, PackedBatch):
        return [inputs]
    return [{**inputs, "packed": rows} for rows in packed.micro_batches]


def tensors_of(micro_batch: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a micro-batch by name."""
    return micro_batch["packed"].named_tensors() if "packed" in micro_batch else micro_batch


__all__ = ["Expansion", "PackedBatch", "PackedRows", "micro_batches_of", "tensors_of"]
