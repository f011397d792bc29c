"""The data of TRL up to 0.23: four columns of tokens, made without adding an end-of-sequence token."""

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, UserTypeError
from . import checks
from .collators import LEGACY_KEYS
from .formats import maybe_apply_chat_template
from .tokenize import keep_fitting

logger = logging.getLogger(__name__)

OLD_TOKEN_COLUMNS = ("input_ids_chosen", "input_ids_rejected")


def prepare_legacy_dataset(
    dataset: Dataset | IterableDataset,
    processing_class: PreTrainedTokenizerBase,
    *,
    num_embeddings: int,
    max_length: int | None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Prepare pairs in the columns of TRL up to 0.23: checked where they are there, made from raw rows where not.

    Pairs longer than ``max_length`` are left out of both, with a warning (those versions kept tokenized ones).

    Args, result and errors are those of `trl_tpu.data.tokenize.prepare_preference_dataset`; raw rows cannot stream.
    """
    columns = checks.column_names(dataset, name)
    missing = set(LEGACY_KEYS) - set(columns)
    is_raw = missing == set(LEGACY_KEYS) and not set(checks.TOKEN_COLUMNS) <= set(columns)
    if missing and not is_raw:
        raise UserError(
            f"The {name} dataset lacks {', '.join(sorted(missing))}; its columns are {sorted(columns)}. "
            f"`RewardDataCollatorWithPadding` reads {', '.join(LEGACY_KEYS)}, the columns of TRL up to 0.23. Leave "
            "`data_collator` out for today's, chosen_ids and rejected_ids."
        )
    if isinstance(dataset, IterableDataset):
        if is_raw:
            raise UserTypeError(f"The old API tokenizes a `datasets.Dataset`, and {name} is a stream: do not stream.")
        settings = {"num_embeddings": num_embeddings, "max_length": max_length, "name": name}
        return dataset.filter(_fits, with_indices=True, fn_kwargs=settings)
    checks.check_margins(dataset, name, nested=True)
    if is_raw:
        dataset = tokenize_legacy(dataset, processing_class, num_proc=num_proc, name=name)
    return keep_fitting(dataset, OLD_TOKEN_COLUMNS, num_embeddings=num_embeddings, max_length=max_length, name=name)


def _fits(row: Mapping[str, Any], index: int, num_embeddings: int, max_length: int | None, name: str) -> bool:
    """Tell whether a streamed pair is short enough; raise for a bad one, as for one of a whole dataset."""
    where = checks.row_of(index, name)
    if "margin" in row:
        checks.check_margin(row["margin"], where, nested=True)
    for key in OLD_TOKEN_COLUMNS:
        checks.check_ids(row[key], key, where, num_embeddings)
    return max_length is None or max(len(row[key]) for key in OLD_TOKEN_COLUMNS) <= max_length


def _tokenize(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into ``input_ids_*`` and ``attention_mask_*``."""
    columns = {}
    for half in ("chosen", "rejected"):
        tokens = tokenizer(list(batch[half]))
        columns[f"input_ids_{half}"] = tokens["input_ids"]
        columns[f"attention_mask_{half}"] = tokens["attention_mask"]
    return columns


def tokenize_legacy(
    dataset: Dataset, processing_class: PreTrainedTokenizerBase, *, num_proc: int | None, name: str
) -> Dataset:
    """Make the columns of TRL 0.14 to 0.23 from raw rows.

    Messages are rendered by the chat template, and their text takes the place of the messages in the columns. An
    explicit prompt is *not* part of what is tokenized: those versions left it out, and their numbers are kept; a
    warning says so. Other columns, ``margin`` among them, stay.

    Args and errors are those of `trl_tpu.data.tokenize.prepare_preference_dataset`.

    Returns:
        The dataset with ``input_ids_chosen``, ``attention_mask_chosen``, ``input_ids_rejected`` and
        ``attention_mask_rejected``.
    """
    checks.check_columns(dataset.column_names, name)
    if "prompt" in dataset.column_names:
        logger.warning(
            f"{name} dataset: as in TRL up to 0.23, the column `prompt` is left out of the tokens, so rewards do not "
            "see it. Put it at the beginning of both dialogues, or use today's columns and collator."
        )
    settings = {"processing_class": processing_class, "name": name}
    dataset = dataset.map(_render, with_indices=True, fn_kwargs=settings, num_proc=num_proc)
    return dataset.map(
        _tokenize,
        batched=True,
        fn_kwargs={"tokenizer": processing_class},
        num_proc=num_proc,
        desc=f"Tokenizing {name} dataset",
    )


def _render(row: dict[str, Any], index: int, processing_class: PreTrainedTokenizerBase, name: str) -> dict[str, Any]:
    checks.check_raw_row(row, checks.row_of(index, name))
    with checks.rendering(checks.row_of(index, name)):
        return maybe_apply_chat_template(dict(row), processing_class)
