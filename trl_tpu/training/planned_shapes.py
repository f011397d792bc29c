"""Shapes of batches on a device that compiles each: rows of packed batches, and lengths of padded ones."""

import numpy as np
from datasets import Dataset

from ..config.reward_config import RewardConfig
from ..data.measure import measure
from ..packing.shapes import RowPlan, attention_crossover_length, plan_rows


def plan_rows_of(
    dataset: Dataset,
    hidden_size: int,
    pairs: int,
    shards: int,
    args: RewardConfig,
    expands: bool = False,
    multiple: int = 32,
    sizes_N: np.ndarray | None = None,
) -> RowPlan:
    """Plan the rows in which batches of ``pairs`` pairs of ``dataset`` are packed.

    Args:
        expands: Whether attention reads rows of whole sequences: then what all sequences share takes room in each.
        multiple: Lengths are multiples of this.
        sizes_N: From `sizes_by_prompt`, instead of sizes that are the pairs' own.

    Raises:
        UserError: For too short a `row_length`.
    """
    measured = measure(dataset)
    return plan_rows(
        measured.lengths.sizes_P if sizes_N is None else sizes_N,
        pairs,
        shards,
        max_shapes=args.max_shapes,
        shared_prefix=0 if expands else measured.shared_prefix,
        attention_crossover_length=attention_crossover_length(hidden_size),
        multiple=multiple,
        row_length=args.row_length,
    )


# below this, a mask for each query and key costs less than moving every layer's queries, keys and values
LONG_ROW = 2048
