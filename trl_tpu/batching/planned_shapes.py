"""Plans the shapes of a dataset's batches for a device that compiles each: rows to pack pairs in, or lengths."""

from typing import Any

import numpy as np
from datasets import Dataset

from ..config.reward_config import RewardConfig
from ..data.collators import bucket_lengths
from ..data.measure import measure
from ..packing.schedule import RowPlan, plan_rows
from ..packing.shapes import attention_crossover_length


def plan_rows_of(
    dataset: Dataset,
    hidden_size: int,
    pairs: int,
    shards: int,
    args: RewardConfig,
    expands: bool = False,
    multiple: int = 32,
    drawn_BP: np.ndarray | None = None,
) -> RowPlan:
    """Plan the rows in which batches of ``pairs`` pairs of ``dataset`` are packed.

    Args:
        expands: Whether attention reads rows of whole dialogues: then what all dialogues share takes room in each.
        multiple: Lengths are multiples of this.
        drawn_BP: Batches in the order of training, where it is not random; see `plan_shapes`.

    Raises:
        UserError: For too short a `row_length`.
    """
    measured = measure(dataset)
    return plan_rows(
        measured.sizes_N,
        pairs,
        shards,
        max_shapes=args.max_shapes,
        shared_prefix=0 if expands else measured.shared_prefix,
        attention_crossover_length=attention_crossover_length(hidden_size),
        multiple=multiple,
        row_length=args.row_length,
        drawn_BP=drawn_BP,
    )


def planned_lengths(dataset: Any, args: RewardConfig) -> tuple[int, ...] | None:
    """Choose the row lengths of padded batches of ``dataset`` on a device that compiles once per length.

    A few that fit the data, or with `pad_to_multiple_of` the multiples. None for a stream without `max_length`.
    """
    is_known = isinstance(dataset, Dataset) and len(dataset) > 0
    longest = int(measure(dataset).longest_N.max()) if is_known else args.max_length
    if not longest:
        return None
    if multiple := args.pad_to_multiple_of:
        assert isinstance(multiple, int)  # the config has read its text forms
        return tuple(range(multiple, longest + -longest % multiple + 1, multiple))
    return bucket_lengths(longest, args.max_shapes)
