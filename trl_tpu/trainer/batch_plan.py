"""The trainer's decision to pack, and the plan of rows for its data."""

import logging
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from .. import runtime
from ..data.measure import common_beginning, pair_sizes
from ..modeling.adapters import without_adapters
from ..modeling.attention.expanded import ExpansionImpossible, use_expanded_attention
from ..modeling.attention.masked import goes_tree_by_tree
from ..modeling.attention.packability import PackingImpossible, make_packable
from ..packing.schedule import RowPlan, plan_rows
from .reward_config import RewardConfig

logger = logging.getLogger(__name__)

# below this, a mask for each query and key costs less than moving every layer's queries, keys and values
_LONG_ROW = 2048


def packing_obstacle(args: RewardConfig, data_collator: Any, computes_own_loss: bool, old_columns: bool) -> str | None:
    """What, besides model and data, keeps batches from being packed; None if nothing does."""
    counts_tokens = getattr(args.include_num_input_tokens_seen, "value", args.include_num_input_tokens_seen)
    obstacles = {
        "packing is turned off": args.packing == "false",
        "this is the old API, with its own columns and collator": old_columns,
        "a data collator of your own makes the batches": data_collator is not None,
        "compute_loss is overridden, and such code expects padded rows": computes_own_loss,
        "nn.DataParallel would cut packed rows apart (launch one process a GPU instead)": args.n_gpu > 1,
        "include_num_input_tokens_seen counts padded rows (num_tokens in the logs needs none)": (
            counts_tokens not in (False, "no")
        ),
    }
    return next((obstacle for obstacle, is_there in obstacles.items() if is_there), None)


def try_to_pack(model: PreTrainedModel, pad_token_id: int, train_dataset: Any) -> str | None:
    """Prepare ``model`` for packed rows; what in it or in the data keeps batches from being packed, if anything."""
    try:
        make_packable(model, pad_token_id)
    except PackingImpossible as reason:
        return str(reason)
    if not takes_tight_rows(model) and not isinstance(train_dataset, Dataset):
        return "train_dataset is a stream, and row shapes are chosen from the data beforehand"
    return None


def takes_tight_rows(model: PreTrainedModel) -> bool:
    """Whether batches are one row without padding: where any shape does, and attention goes tree by tree."""
    base = without_adapters(model)
    return not runtime.current().compiles and goes_tree_by_tree(base)


def report_obstacle(args: RewardConfig, obstacle: str) -> None:
    """Say once why batches are padded.

    Raises:
        ValueError: If the user insists on packing.
    """
    if args.packing == "true":
        raise ValueError(f"packing=True is impossible: {obstacle}. Leave packing at 'auto', or remove the obstacle.")
    if args.packing == "auto":
        logger.warning(f"Batches are padded, not packed: {obstacle}.")


def expands_rows(model: PreTrainedModel, longest_row: int, args: RewardConfig) -> bool:
    """Choose how packed rows attend on XLA, and prepare ``model`` for it: whether in rows of whole dialogues.

    Raises:
        ExpansionImpossible: If the user insists and the model's attention is more than the kernels compute.
    """
    long = runtime.current().has_attention_kernel() and longest_row >= _LONG_ROW
    if args.packed_attention == "masks" or (args.packed_attention == "auto" and not long):
        return False
    try:
        use_expanded_attention(model)
    except ExpansionImpossible as reason:
        if args.packed_attention == "expanded":
            raise
        logger.warning(f"Rows of {longest_row} tokens attend through masks of their length squared. {reason}")
        return False
    return True


def plan_rows_of(
    dataset: Dataset, hidden_size: int, pairs: int, shards: int, args: RewardConfig, expands: bool = False
) -> RowPlan:
    """The rows in which batches of ``pairs`` pairs of ``dataset`` are packed on XLA.

    Args:
        expands: Whether attention reads rows of whole dialogues: then what all dialogues share takes room in each, and
            kernels want lengths in large multiples.

    Raises:
        ValueError: For too short a `row_length`.
    """
    names = ["chosen_ids", "rejected_ids"]
    chunks = [chunk for chunk in dataset.with_format("arrow", columns=names).iter(batch_size=10_000) if len(chunk)]
    sizes = np.concatenate([pair_sizes(*(chunk[name] for name in names)) for chunk in chunks])
    return plan_rows(
        sizes,
        pairs,
        shards,
        most=args.max_shapes,
        common=0 if expands else common_beginning(chunk[name] for chunk in chunks for name in names),
        attention_length=attention_length(hidden_size),
        multiple=256 if expands and runtime.current().has_attention_kernel() else 32,
        row_length=args.row_length,
    )


def attention_length(hidden_size: int) -> float:
    """The row length at which attention costs as much as the linear layers of a plain transformer, in operations.

    Of a layer's multiplications a token takes 12 H^2 in its linear layers and 2 H L in attention over L others.
    """
    return 6 * hidden_size
