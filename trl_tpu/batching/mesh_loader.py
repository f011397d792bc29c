"""Batches for a mesh of devices: in TRL's order, and each host reads the pairs of its own devices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import TrainingArguments

from ..data.collators import PairRows
from ..data.loader import host_batches, read_own, training_order
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

    Args:
        collate: Makes a batch of examples.
        sampler: Transformers' choice; None for a stream, or for the dataset's own order.
    """
    if sampler is not None:
        sampler = training_order(dataset, sampler, args.data_seed)
    own_rows = rows_of_host(runtime.topology().local_positions, batch_size, mesh)
    if len(own_rows) < batch_size and isinstance(collate, PairRows) and isinstance(dataset, Dataset):
        dataset, collate = read_own(dataset, collate, own_rows)
    return runtime.loader(host_batches(dataset, collate, batch_size, sampler, args), mesh.batch_axes)


def rows_of_host(positions: Sequence[int], count: int, mesh: MeshShape) -> np.ndarray:
    """Return the rows of a batch of ``count`` rows that a host's devices hold, ascending.

    Rows go over the batch axes, inside of which is `tensor`: devices that differ in it alone hold the same rows, also
    when they are on several hosts. A batch that the axes do not divide is whole on every device.

    Args:
        positions: Where in the mesh, last axis fastest, the host's devices are. They need not follow one another:
            chips are numbered through their grid, of which a host has a block.
    """
    if count % mesh.batch_shards:
        return np.arange(count)
    each = count // mesh.batch_shards
    parts = sorted({position // mesh.tensor for position in positions})
    return np.concatenate([np.arange(part * each, (part + 1) * each) for part in parts])
