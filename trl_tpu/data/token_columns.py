"""Pairs in the columns of TRL up to 0.23 become `chosen_ids` and `rejected_ids`."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .batch import OLD_KEYS
from .formats import maybe_apply_chat_template

OLD_IDS = OLD_KEYS[::2]


def token_columns(columns: Collection[str], name: str) -> tuple[str, ...]:
    """Return the columns that hold the token ids of pairs; none if pairs are raw.

    Raises:
        UserError: Some of the four columns of TRL up to 0.23 are missing.
    """
    if set(checks.TOKEN_COLUMNS) <= set(columns):
        return checks.TOKEN_COLUMNS
    missing = [column for column in OLD_KEYS if column not in columns]
    if len(missing) == len(OLD_KEYS):
        return ()
    if missing:
        raise UserError(
            f"The {name} dataset lacks {', '.join(missing)}; its columns are {sorted(columns)}. Rows in the form of "
            f"TRL up to 0.23 have {', '.join(OLD_KEYS)}; today's have {' and '.join(checks.TOKEN_COLUMNS)}."
        )
    return OLD_IDS


def read_old_columns(dataset: Dataset | IterableDataset, num_embeddings: int, name: str) -> Dataset | IterableDataset:
    """Check pairs in the columns of TRL up to 0.23, and make them `chosen_ids` and `rejected_ids`.

    What an attention mask leaves out is no part of an answer, and a margin may be a list of one.

    Raises:
        UserTypeError: A value is no list of integers.
        UserError: Token ids that the model lacks, or a mask with a hole.
    """
    settings = {"num_embeddings": num_embeddings, "name": name}
    return dataset.map(_read_old, with_indices=True, fn_kwargs=settings, remove_columns=list(OLD_KEYS))


def _read_old(row: Mapping[str, Any], index: int, num_embeddings: int, name: str) -> dict[str, Any]:
    answers = dict[str, Any]()
    for new, old in zip(checks.TOKEN_COLUMNS, OLD_IDS, strict=True):
        where, mask = checks.row_of(index, name, old), row[old.replace("input_ids", "attention_mask")]
        checks.check_ids(row[old], where, num_embeddings)
        kept = np.flatnonzero(mask)
        if not len(kept) or len(mask) != len(row[old]) or len(kept) != np.ptp(kept) + 1:
            raise UserError(
                f"{where}: the attention mask must be as long as the token ids, and 0 only before or after all tokens "
                f"that count, got {mask!r:.80}."
            )
        answers[new] = list(row[old][kept[0] : kept[-1] + 1])
    return answers | old_margin(row, index, name)


def old_margin(row: Mapping[str, Any], index: int, name: str) -> dict[str, float]:
    """Return the margin, if any, of a row for TRL up to 0.23, which may be a list of one number.

    Raises:
        UserError: It is not finite, or a list of several.
    """
    if "margin" not in row:
        return {}
    margin = np.asarray(row["margin"])
    margin = margin[0] if margin.shape == (1,) else margin
    checks.check_margin(margin, checks.row_of(index, name, "margin"))
    return {"margin": float(margin)}


def render_old(row: dict[str, Any], where: str, processing_class: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a raw row's two texts as TRL up to 0.23 tokenized them: without the prompt."""
    with checks.rendering(where):
        rendered = maybe_apply_chat_template(row, processing_class)
    return {column: rendered[column] for column in checks.RAW_COLUMNS}


def _tokenize(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into the columns of TRL up to 0.23, where it is public."""
    columns = {}
    for half in checks.RAW_COLUMNS:
        tokens = tokenizer(list(batch[half]))
        columns[f"input_ids_{half}"] = tokens["input_ids"]
        columns[f"attention_mask_{half}"] = tokens["attention_mask"]
    return columns
