"""Batches for a mesh of devices, in TRL's order."""

from typing import Any

from torch.utils.data import Sampler
from transformers import TrainingArguments

from ..data.loader import host_batches, training_order
from ..parallel.mesh import MeshShape
from ..runtime import Runtime


def mesh_loader(
    dataset: Any,
    collate: Any,
    batch_size: int,
    sampler: Sampler[int] | None,
    args: TrainingArguments,
    mesh: MeshShape,
    runtime: Runtime,
) -> Any:
    """Return a loader of batches split over ``mesh``: accelerate's replicates them and forgets its settings on resume.

    Each host makes the whole batch, and uploads what its devices hold of it.

    Args:
        collate: Makes a batch of examples.
        sampler: Transformers' choice; None for a stream, or for the dataset's own order.
    """
    if sampler is not None:
        sampler = training_order(dataset, sampler, args.data_seed)
    return runtime.loader(host_batches(dataset, collate, batch_size, sampler, args), mesh.batch_axes)
