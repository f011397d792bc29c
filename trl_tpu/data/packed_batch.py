"""A batch of pairs as a collator hands it on in packed rows: the micro-batches that it is computed in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..packing.rows import PackedRows


@dataclass(frozen=True)
class PackedBatch:
    """All micro-batches of one batch. Their losses, and so their gradients, add up to the batch's.

    It moves to a device as a tensor does: accelerate calls `to`, and a DataLoader that pins memory `pin_memory`.
    """

    micro_batches: tuple[PackedRows[torch.Tensor], ...]
    """In order: all but the last only accumulate gradients, and the last also updates."""

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
        """Return the same batch with ``function`` of each tensor in its place."""
        return PackedBatch(tuple(rows.map_tensors(function) for rows in self.micro_batches))

    def to(self, device: Any, non_blocking: bool = False) -> "PackedBatch":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        return self.map_tensors(torch.Tensor.pin_memory)


class PackedInputs(dict[str, Any]):
    """A batch in packed rows, or one of its micro-batches, which says so to code that looks for padded rows."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key!r} is not in a batch of packed rows. Set packing=False in RewardConfig for padded rows.")


def is_packed(inputs: Any) -> bool:
    """Tell whether a collator of ours made these packed rows; a user's batch may have any keys."""
    return isinstance(inputs, Mapping) and isinstance(inputs.get("packed"), PackedBatch)


def is_micro_batch(inputs: Any) -> bool:
    """Tell whether these are packed rows of one micro-batch."""
    return isinstance(inputs, Mapping) and isinstance(inputs.get("rows"), PackedRows)


def micro_batches_of(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Split what a collator gave into what is computed at a time, in order; a padded batch is one micro-batch.

    Those of a `PackedBatch`, under the key "packed", are `PackedRows` under the key "rows".
    """
    if not is_packed(inputs):
        return [inputs]
    others = {key: value for key, value in inputs.items() if key != "packed"}
    return [PackedInputs(others, rows=rows) for rows in inputs["packed"].micro_batches]


def tensors_of(micro_batch: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a micro-batch by name."""
    return micro_batch["rows"].named_tensors() if is_micro_batch(micro_batch) else micro_batch
