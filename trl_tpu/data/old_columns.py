"""The data of TRL up to 0.23: four columns of tokens, made without adding an end-of-sequence token."""

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .collators import LEGACY_KEYS
from .conversion import convert_row
from .formats import maybe_apply_chat_template
from .tokenize import keep_fitting, map_rows

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
    truncation_mode: str | None = None,
) -> Dataset | IterableDataset:
    """Prepare pairs in the columns of TRL 0.14 to 0.23: checked where they are there, made from raw rows where not.

    Messages are rendered by the chat template, and their text takes the place of the messages in the columns. An
    explicit prompt is *not* part of what is tokenized: those versions left it out, and their numbers are kept; a
    warning says so. Other columns, ``margin`` among them, stay. Pairs longer than ``max_length`` are cut or left
    out, with a warning (those versions kept tokenized ones).

    Args and errors are those of `trl_tpu.data.tokenize.prepare_preference_dataset`.

    Returns:
        The dataset with ``input_ids_chosen``, ``attention_mask_chosen``, ``input_ids_rejected`` and
        ``attention_mask_rejected``.
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
    if is_raw:
        checks.check_columns(columns, name)
        if "prompt" in columns:
            logger.warning(
                f"{name} dataset: as in TRL up to 0.23, the column `prompt` is left out of the tokens, so rewards do "
                "not see it. Put it at the beginning of both dialogues, or use today's columns and collator."
            )
        settings = {"processing_class": processing_class, "name": name}
        dataset = map_rows(dataset, _render, num_proc, name, with_indices=True, fn_kwargs=settings)
        settings = {"tokenizer": processing_class}
        dataset = map_rows(dataset, _tokenize, num_proc, name, batched=True, fn_kwargs=settings)
    more: dict[str, Any] = {"max_length": max_length, "truncation_mode": truncation_mode, "num_proc": num_proc}
    return keep_fitting(dataset, OLD_TOKEN_COLUMNS, num_embeddings=num_embeddings, name=name, **more)


def _render(row: dict[str, Any], index: int, processing_class: PreTrainedTokenizerBase, name: str) -> dict[str, Any]:
    where, (row, _) = checks.row_of(index, name), convert_row(row)
    checks.check_raw_row(row, {column: row[column] for column in checks.RAW_COLUMNS}, where)
    with checks.rendering(where):
        return maybe_apply_chat_template(row, processing_class)


def _tokenize(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into ``input_ids_*`` and ``attention_mask_*``."""
    columns = {}
    for half in ("chosen", "rejected"):
        tokens = tokenizer(list(batch[half]))
        columns[f"input_ids_{half}"] = tokens["input_ids"]
        columns[f"attention_mask_{half}"] = tokens["attention_mask"]
    return columns
