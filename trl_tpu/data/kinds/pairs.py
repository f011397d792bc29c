"""Pairs: rows with a chosen and a rejected answer."""

import difflib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ...errors import UserError, UserKeyError
from .. import checks
from ..checks import RAW_COLUMNS, Row
from .base import RowKind, ScoredItem, numbers_in

logger = logging.getLogger(__name__)

_OPTIONAL_COLUMNS = ("prompt", "margin", "chosen_probability", "tools", "chat_template_kwargs")
_ACCEPTED = (
    "Pairs have `chosen` and `rejected` (text, or lists of messages) or, already tokenized, `chosen_ids` and "
    "`rejected_ids`. Rankings have `completions` (a list of answers) and their `scores` or `ranks`; single answers "
    "have a `completion` and its `label` or `score`."
)


@dataclass(frozen=True)
class Pairs(RowKind):
    """Rows with a chosen and a rejected answer, and optional `margin` or `chosen_probability`."""

    name = unit = "pairs"
    too_long = "pairs with a conversation"
    are_pairs = True
    columns = token_columns = ("chosen_ids", "rejected_ids")
    optional_columns = ("margin", "chosen_probability")
    scored_columns = {"chosen": ("reward_chosen", "tokens_chosen"), "rejected": ("reward_rejected", "tokens_rejected")}

    def is_raw(self, row: Row) -> bool:
        return set(RAW_COLUMNS) <= row.keys() and not rejects_several(row)

    def check_dataset(self, columns: Collection[str], name: str) -> Self:
        """Raise UserKeyError if a required column is missing; warn if an optional column looks misspelled."""
        if not any(set(needed) <= set(columns) for needed in (RAW_COLUMNS, self.columns)):
            raise UserKeyError(f"{_ACCEPTED} The {name} dataset has the columns {sorted(columns)}.")
        for unused in {*columns} - {*RAW_COLUMNS, *self.columns, *_OPTIONAL_COLUMNS}:
            for similar in difflib.get_close_matches(unused, {*_OPTIONAL_COLUMNS} - {*columns}, n=1, cutoff=0.85):
                logger.warning(
                    f"The {name} dataset's column `{unused}` is not used; if `{similar}` is meant, rename it."
                )
        return self

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        answers = {column: row[column] for column in RAW_COLUMNS}
        checks.check_raw_row(row, answers, where)
        return answers

    def check_labels(self, row: Row, where: str) -> None:
        """Raise UserError if the margin is not a finite number, or the probability is not from 0 to 1."""
        for name, (least, most) in {"margin": (-np.inf, np.inf), "chosen_probability": (0, 1)}.items():
            value = row.get(name, 0)
            if not checks.is_number(value) or not least <= value <= most:
                raise UserError(
                    f"{where}: `{name}` is {value!r:.80}; it must be a finite number, and a probability from 0 to 1. "
                    "Correct or remove such rows, or drop the column."
                )

    def grades(self, labels: Mapping[str, Any]) -> list[float]:
        """Return the probability of each answer to be the better one."""
        probability = labels.get("chosen_probability", 1.0)
        return [probability, 1 - probability]

    def compared(self, grade_GK: np.ndarray, learns_ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array([0]), np.array([1]), grade_GK[:, :1]

    def outputs(self, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        chosen_N, rejected_N = rewards.unbind(-1)
        return {"rewards_chosen": chosen_N, "rewards_rejected": rejected_N}

    def predictions(self, rewards: torch.Tensor, grade: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards [N, 2], chosen first, and labels [N], all 0, as in TRL."""
        return rewards, torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)

    def lists_answers(self, row: Row) -> bool:
        return any(isinstance(row.get(reward), list) for reward, _ in self.scored_columns.values())

    def token_counts(self, row: Row) -> list[Any] | None:
        return [row.get(tokens) for _, tokens in self.scored_columns.values()]

    def from_scored(self, row: Row) -> Iterator[ScoredItem]:
        """Yield the row's pair, or its list of right and wrong answers."""
        chosen, rejected = (numbers_in(row.get(reward)) for reward, _ in self.scored_columns.values())
        probability = row.get("chosen_probability")
        better = float(probability) if isinstance(probability, int | float) else 1.0
        if better == 0.5 and len(chosen) + len(rejected) > 2:  # no answer is labeled as right
            return
        yield row, [*chosen, *rejected], [better] * len(chosen) + [1 - better] * len(rejected)


def rejects_several(row: Row) -> bool:
    """Check whether a converted row has one chosen answer and a list of rejected answers."""
    chosen, rejected = (
        isinstance(row[half], list) and bool(row[half]) and not isinstance(row[half][0], dict) for half in RAW_COLUMNS
    )
    return rejected and not chosen
