"""Pairs of TRL up to 0.23: their columns, their tokens and their collator."""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .batch import Example
from .chat_templates import maybe_apply_chat_template
from .checks import RAW_COLUMNS
from .measure import OLD_KEYS, PAIR, form_of
from .row_formats import Row

OLD_IDS = OLD_KEYS[::2]


def read_old_row(row: Row, index: int, num_embeddings: int, name: str) -> dict[str, Any]:
    """Return the columns of today for a pair in the columns of TRL up to 0.23.

    Tokens that an attention mask leaves out are no part of an answer, and a margin may be a list of one.

    Raises:
        UserTypeError: A value is not a list of integers.
        UserError: The model lacks a token id, or a mask has a hole or another length.
    """
    answers = dict[str, Any]()
    for new, old in zip(PAIR, OLD_IDS, strict=True):
        ids, mask, where = row[old], row[old.replace("input_ids", "attention_mask")], checks.row_of(index, name, old)
        checks.check_ids(ids, where, num_embeddings)
        kept = np.flatnonzero(mask)
        if not len(kept) or len(mask) != len(ids) or len(kept) != np.ptp(kept) + 1:
            raise UserError(
                f"{where}: the attention mask must be as long as the token ids, and 0 only before or after all tokens "
                f"that count, got {mask!r:.80}."
            )
        answers[new] = list(ids[kept[0] : kept[-1] + 1])
    return answers | old_margin(row, index, name)


def old_margin(row: Row, index: int, name: str) -> dict[str, float]:
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
    return {column: rendered[column] for column in RAW_COLUMNS}


def _tokenize(batch: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into the columns of TRL up to 0.23, where it is public."""
    tokens = [tokenizer(list(batch[half])) for half in RAW_COLUMNS]
    return dict(zip(OLD_KEYS, [each[key] for each in tokens for key in ("input_ids", "attention_mask")], strict=True))


def old_columns(row: Example) -> Example:
    """Return a tokenized pair in the columns of TRL up to 0.23, with its other columns, for collators of users."""
    if form_of(row) != PAIR:
        return row
    chosen, rejected = (row[column] for column in PAIR)
    halves = zip(OLD_KEYS, (chosen, [1] * len(chosen), rejected, [1] * len(rejected)), strict=True)
    return {name: value for name, value in row.items() if name not in PAIR} | dict(halves)
