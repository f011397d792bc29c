"""Plans the shapes of a dataset's batches for a device that compiles each: rows to pack pairs in, or lengths."""

import logging
from typing import Any

import numpy as np
from datasets import Dataset

from ..config.reward_config import RewardConfig
from ..data.measure import PAIR, has_form, measure, read_row
from ..data.prompts import ByPrompt, prompt_groups
from ..errors import UserError
from ..packing.schedule import RowPlan, plan_rows
from ..packing.shapes import attention_crossover_length, round_up
from ..packing.trie import in_order

logger = logging.getLogger(__name__)

_DRAWN = 2048  # pairs whose tokens are read to know what they share


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
        measured.sizes_N if sizes_N is None else sizes_N,
        pairs,
        shards,
        max_shapes=args.max_shapes,
        shared_prefix=0 if expands else measured.shared_prefix,
        attention_crossover_length=attention_crossover_length(hidden_size),
        multiple=multiple,
        row_length=args.row_length,
    )


def sizes_by_prompt(dataset: Any, pairs: int) -> np.ndarray:
    """Return the tokens that pairs add to batches in the order of `ByPrompt`, and say in the log what that saves.

    The last ``pairs`` are the largest pairs by themselves, so that what holds these sizes holds any batch.

    Raises:
        UserError: For a stream, and for rankings.
    """
    if not has_form(dataset, PAIR):
        raise UserError(
            "group_by_prompt=True puts pairs into an order of its own, but train_dataset is a stream, which has its "
            "order, or has rankings, whose prompts are together: load a stream whole (without dataset_streaming), or "
            "leave group_by_prompt out."
        )
    measured, group_N = measure(dataset), prompt_groups(dataset)
    order_N, added = list(ByPrompt(group_N, pairs)), list[int]()
    for first in range(0, min(_DRAWN, len(order_N)), pairs):
        rows = map(dataset.__getitem__, order_N[first : first + pairs])
        sequences = [np.asarray(ids) for row in rows for ids in read_row(row)["answers"]]
        order, shared = in_order(sequences)
        added_D = np.array([len(ids) for ids in sequences])
        added_D[order] -= [measured.shared_prefix, *shared]
        added += added_D.reshape(-1, 2).sum(axis=1).tolist()
    here, alone = np.mean(added), measured.sizes_N.mean() - measured.shared_prefix
    logger.warning(
        f"group_by_prompt: {len(group_N):,} pairs have {group_N.max() + 1:,} prompts. A pair in packed batches of "
        f"{pairs} takes {here:,.0f} tokens, not {alone:,.0f} ({1 - here / alone:.0%} less), beside what all share."
    )
    sizes_N = np.resize(added, len(dataset)) + measured.shared_prefix
    return np.append(sizes_N, np.sort(measured.sizes_N)[-pairs:])


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


def bucket_lengths(longest: int, max_lengths: int = 4, multiple: int = 64) -> tuple[int, ...]:
    """Return a few row lengths that cover every batch: the longest, rounded up to ``multiple``, and successive halves.

    >>> bucket_lengths(1000)
    (128, 256, 512, 1024)
    >>> bucket_lengths(30)
    (64,)
    """
    halves = (round_up(longest, 2**halvings) // 2**halvings for halvings in range(max_lengths))
    return tuple(sorted({round_up(length, multiple) for length in halves}))
