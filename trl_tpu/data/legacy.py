"""Tokenising as TRL 0.14 to 0.23 did it: four columns, no end-of-sequence token added."""

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl_tpu.data import checks
from trl_tpu.data.formats import maybe_apply_chat_template
from trl_tpu.data.tokenize import DataReport, keep_fitting

logger = logging.getLogger(__name__)


def _tokenize(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenise a batch of ``chosen`` and ``rejected`` texts into ``input_ids_*`` and ``attention_mask_*``."""
    chosen, rejected = tokenizer(list(batch["chosen"])), tokenizer(list(batch["rejected"]))
    return {
        "input_ids_chosen": chosen["input_ids"],
        "attention_mask_chosen": chosen["attention_mask"],
        "input_ids_rejected": rejected["input_ids"],
        "attention_mask_rejected": rejected["attention_mask"],
    }


def tokenize_legacy(
    dataset: Dataset,
    processing_class: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    num_proc: int | None,
    name: str,
) -> tuple[Dataset, DataReport]:
    """Make the columns of TRL 0.14 to 0.23 from raw rows, and leave out the pairs that are too long.

    Messages are rendered by the chat template, and their text takes the place of the messages in the columns. An
    explicit prompt is *not* part of what is tokenised: those versions left it out, and their numbers are kept; a
    warning says so. Other columns, ``margin`` among them, stay.

    Args and errors are those of `trl_tpu.data.tokenize.prepare_preference_dataset`; only a `datasets.Dataset` will do.

    Returns:
        The dataset with ``input_ids_chosen``, ``attention_mask_chosen``, ``input_ids_rejected`` and
        ``attention_mask_rejected``, and what was found.
    """
    columns = checks.column_names(dataset, name)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"The old API takes a `datasets.Dataset`, got `{type(dataset).__name__}` ({name}).")
    checks.check_columns(columns, name)
    checks.check_margins(dataset, name, nested=True)
    if "prompt" in columns:
        logger.warning(
            f"{name} dataset: as in TRL up to 0.23, the column `prompt` is left out of the tokens, so rewards do not "
            "see it. Put it at the beginning of both dialogues, or use today's columns and collator."
        )
    settings = {"processing_class": processing_class, "name": name}
    dataset = dataset.map(_render, with_indices=True, fn_kwargs=settings, num_proc=num_proc)
    dataset = dataset.map(
        _tokenize,
        batched=True,
        fn_kwargs={"tokenizer": processing_class},
        num_proc=num_proc,
        desc=f"Tokenizing {name} dataset",
    )
    return keep_fitting(dataset, ("input_ids_chosen", "input_ids_rejected"), max_length=max_length, name=name)


def _render(row: dict[str, Any], index: int, processing_class: PreTrainedTokenizerBase, name: str) -> dict[str, Any]:
    checks.check_raw_row(row, index, name)
    return maybe_apply_chat_template(dict(row), processing_class)
