"""The data of TRL up to 0.23: four columns of tokens, made without adding an end-of-sequence token."""

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from trl_tpu.data import checks
from trl_tpu.data.collators import LEGACY_KEYS
from trl_tpu.data.formats import maybe_apply_chat_template
from trl_tpu.data.tokenize import keep_fitting
from trl_tpu.errors import UserError, UserTypeError

logger = logging.getLogger(__name__)

_IDS = ("input_ids_chosen", "input_ids_rejected")


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
    missing = [key for key in LEGACY_KEYS if key not in columns]
    if len(missing) == len(LEGACY_KEYS):
        _check_no_new_columns(columns, name)
        made = tokenize_legacy(dataset, processing_class, num_proc=num_proc, name=name)
        return keep_fitting(made, _IDS, num_embeddings=num_embeddings, max_length=max_length, name=name)
    if missing:
        raise UserError(
            f"The {name} dataset lacks {', '.join(missing)}; its columns are {sorted(columns)}. The columns of TRL up "
            f"to 0.23 are {', '.join(LEGACY_KEYS)}; today's are chosen_ids and rejected_ids, without masks."
        )
    if isinstance(dataset, IterableDataset):
        settings = {"num_embeddings": num_embeddings, "max_length": max_length, "name": name}
        return dataset.filter(_fits, with_indices=True, fn_kwargs=settings)
    checks.check_margins(dataset, name, nested=True)
    return keep_fitting(dataset, _IDS, num_embeddings=num_embeddings, max_length=max_length, name=name)


def _check_no_new_columns(columns: list[str], name: str) -> None:
    if set(checks.TOKEN_COLUMNS) <= set(columns):
        raise UserError(
            f"`RewardDataCollatorWithPadding` reads the columns {', '.join(LEGACY_KEYS)}, but the {name} dataset has "
            f"today's: {', '.join(checks.TOKEN_COLUMNS)}. Leave `data_collator` out, or pass a "
            "`DataCollatorForPreference`."
        )


def _fits(row: Mapping[str, Any], index: int, num_embeddings: int, max_length: int | None, name: str) -> bool:
    """Tell whether a streamed pair is short enough; raise for a bad one, as for one of a whole dataset."""
    where = checks.row_of(index, name)
    if "margin" in row:
        checks.check_margin(row["margin"], where, nested=True)
    for key in _IDS:
        checks.check_ids(row[key], key, where, num_embeddings)
    return max_length is None or max(len(row[key]) for key in _IDS) <= max_length


def _tokenize(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into ``input_ids_*`` and ``attention_mask_*``."""
    chosen, rejected = tokenizer(list(batch["chosen"])), tokenizer(list(batch["rejected"]))
    return {
        "input_ids_chosen": chosen["input_ids"],
        "attention_mask_chosen": chosen["attention_mask"],
        "input_ids_rejected": rejected["input_ids"],
        "attention_mask_rejected": rejected["attention_mask"],
    }


def tokenize_legacy(
    dataset: Dataset, processing_class: PreTrainedTokenizerBase, *, num_proc: int | None, name: str
) -> Dataset:
    """Make the columns of TRL 0.14 to 0.23 from raw rows.

    Messages are rendered by the chat template, and their text takes the place of the messages in the columns. An
    explicit prompt is *not* part of what is tokenized: those versions left it out, and their numbers are kept; a
    warning says so. Other columns, ``margin`` among them, stay.

    Args and errors are those of `trl_tpu.data.tokenize.prepare_preference_dataset`; only a `datasets.Dataset` will do.

    Returns:
        The dataset with ``input_ids_chosen``, ``attention_mask_chosen``, ``input_ids_rejected`` and
        ``attention_mask_rejected``.
    """
    columns = checks.column_names(dataset, name)
    if not isinstance(dataset, Dataset):
        raise UserTypeError(f"The old API takes a `datasets.Dataset`, got `{type(dataset).__name__}` ({name}).")
    checks.check_columns(columns, name)
    checks.check_margins(dataset, name, nested=True)
    if "prompt" in columns:
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
    return maybe_apply_chat_template(dict(row), processing_class)
