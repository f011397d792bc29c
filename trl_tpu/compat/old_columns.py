"""Pairs in the form of TRL up to 0.23: its token columns, its collator, and token columns with deprecated names."""

import logging
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import PaddingStrategy

from ..data.checks import OLD_KEYS, RAW_COLUMNS, Row
from ..data.formats import maybe_apply_chat_template
from ..data.kinds import Pairs
from ..data.trl_dict import TABLE, needs_table
from ..errors import UserError

logger = logging.getLogger(__name__)

OLD_NAMES = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}


def with_current_names(dataset: Any) -> Any:
    """Rename the deprecated token columns `OLD_NAMES`."""
    warnings.warn(
        "The columns `chosen_input_ids` and `rejected_input_ids` are deprecated and will not be supported in v1 of "
        "TRL: rename them to `chosen_ids` and `rejected_ids`.",
        FutureWarning,
        stacklevel=4,
    )
    return dataset.rename_columns(OLD_NAMES)


@dataclass(frozen=True)
class OldPairs(Pairs):
    """Pairs for TRL up to 0.23: texts or messages, or token ids and attention masks (`OLD_KEYS`).

    Raw pairs are tokenized without the prompt and without an added end-of-sequence token.
    """

    tokenizer: PreTrainedTokenizerBase
    has_traps = False

    def check_dataset(self, dataset: Any, columns: Collection[str], name: str) -> Self:
        if {*OLD_KEYS} & set(columns):
            return self
        if "prompt" in columns and not {*self.columns} & set(columns):
            logger.warning(
                f"{name} dataset: as in TRL up to 0.23, the column `prompt` is left out of the tokens, so rewards do "
                "not depend on it. Put it at the beginning of both answers, or use TRL's current columns and collator."
            )
        return super().check_dataset(dataset, columns, name)

    def raw_only(self, columns: Sequence[str]) -> list[str]:
        return [column for column in OLD_KEYS if column in columns]

    def tokenize(
        self, rows_N: Sequence[Row], places: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[dict[str, Any], list[str]]]:
        if not {*OLD_KEYS} & rows_N[0].keys():
            return super().tokenize(rows_N, places, tokenizer)
        return [(_read_tokens(row, where), []) for row, where in zip(rows_N, places, strict=True)]

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        super().raw_answers(row, where)
        rendered = maybe_apply_chat_template(dict(row), self.tokenizer)
        return {column: rendered[column] for column in RAW_COLUMNS}

    def with_prompt(self, row: Row, answer: Any, tokenizer: Any) -> Any:
        return answer

    def tokenized(self, row: Row, ids_K: list[list[int]], where: str) -> dict[str, Any]:
        return super().tokenized(row, ids_K, where) | _margin_of(row)


def _read_tokens(row: Row, where: str) -> dict[str, Any]:
    """Return the prepared columns of a tokenized pair. Tokens that the attention mask excludes are dropped.

    Raises:
        UserError: An attention mask has a gap or the wrong length.
    """
    answers = dict[str, Any]()
    for column, half in zip(Pairs.columns, RAW_COLUMNS, strict=True):
        ids, mask = row[f"input_ids_{half}"], row[f"attention_mask_{half}"]
        attended = np.flatnonzero(mask)
        if not len(attended) or len(mask) != len(ids) or len(attended) != np.ptp(attended) + 1:
            raise UserError(
                f"{where}: `attention_mask_{half}` must be as long as the token ids, and 0 only before or after all "
                f"tokens that count, got {mask!r:.80}."
            )
        answers[column] = list(ids[attended[0] : attended[-1] + 1])
    return answers | _margin_of(row)


def _margin_of(row: Row) -> dict[str, Any]:
    """Return the margin, if any, of a row in the form of TRL up to 0.23; it may be a list of one number."""
    margin = row.get("margin")
    if isinstance(margin, list):
        margin = margin[0] if len(margin) == 1 else None  # rejected as no number
    return {"margin": margin} if "margin" in row else {}


@dataclass
class RewardDataCollatorWithPadding:
    """Collator of TRL up to 0.23: pads the chosen and the rejected sequences separately, on the tokenizer's side.

    Each row has `input_ids_chosen`, `attention_mask_chosen`, `input_ids_rejected` and `attention_mask_rejected`,
    and may have a `margin`, a float or a list of one float. The batch has the same keys, [P, longest of that half],
    `margin`, [P], and ``return_loss=True``.

    Args:
        tokenizer: The tokenizer; it pads with its pad token and on its padding side.
        padding: As in the tokenizer's ``pad``: True or "longest", "max_length", or False.
        max_length: The padded length for ``padding="max_length"`` (TRL up to 0.11).
        pad_to_multiple_of: Round lengths up to a multiple of this number.
        return_tensors: Only ``"pt"``.

    Raises:
        UserError: A row lacks one of the four columns.
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | str | PaddingStrategy = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        if missing := [key for key in OLD_KEYS if any(key not in feature for feature in features)]:
            raise UserError(
                f"The features should include {', '.join(OLD_KEYS)}, but {', '.join(missing)} is missing; found "
                f"{', '.join(features[0])}."
            )
        batch: dict[str, Any] = {}
        for half in ("chosen", "rejected"):
            padded = self.tokenizer.pad(
                [{key: feature[f"{key}_{half}"] for key in ("input_ids", "attention_mask")} for feature in features],
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )
            batch |= {f"{key}_{half}": padded[key] for key in ("input_ids", "attention_mask")}
        batch["return_loss"] = True
        if "margin" in features[0]:
            margins = torch.tensor([feature["margin"] for feature in features], dtype=torch.float)
            batch["margin"] = margins.view(len(features))  # [P, 1] would broadcast to [P, P] in the loss
        return batch | dict.fromkeys([TABLE] if needs_table(features[0]) else [])


def _tokenize(batch: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts as the function of this name in TRL up to 0.23 does."""
    halves = [tokenizer(list(batch[half])) for half in RAW_COLUMNS]
    return dict(zip(OLD_KEYS, [half[key] for half in halves for key in ("input_ids", "attention_mask")], strict=True))
