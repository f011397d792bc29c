"""Rows with their rewards, as ``trl-tpu score`` writes them, read back for a verdict."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError, UserFileError
from ..evaluation.best_of_n import Answers, BestOfN, judge_best_of_n
from ..evaluation.proportion import label_of
from ..evaluation.verdict import Verdict, judge_pairs

Row = dict[str, Any]

PAIRS, ANSWERS, REWARDS = "pairs", "several answers", "rewards"
SUFFIXES = (".jsonl", ".json", ".parquet")
DEFAULT_GROUPS = "subset"  # RewardBench's column
_SHAPES = (("reward_chosen", "reward_rejected"), ("rewards",), ("reward",))
# by the column of rewards: that of their texts, and that of their tokens
_COLUMNS = {
    "reward_chosen": (("chosen",), "tokens_chosen"),
    "reward_rejected": (("rejected",), "tokens_rejected"),
    "reward": (("text", "messages"), "tokens"),
    "rewards": (("completions",), "tokens"),
}


@dataclass(frozen=True)
class ScoredRows:
    """Rows of one kind, with their rewards.

    Attributes:
        name: Of the file.
        kind: `PAIRS`, `ANSWERS` (several to a question, some of them right), or `REWARDS` (nothing says which is
            better).
        rows: As they are in the file.
        rewards: Of each row: of its chosen answers and of its rejected ones, which `REWARDS` have not.
        lengths: The same of lengths; None where they are not known.
        unit: What lengths count: tokens or characters.
        eval_by: The column whose labels group the rows.
    """

    name: str
    kind: str
    rows: list[Row]
    rewards: list[tuple[list[float], list[float]]]
    lengths: list[tuple[list[int], list[int]]] | None
    unit: str
    eval_by: str | None

    @cached_property
    def groups(self) -> list[str] | None:
        """The label of each row."""
        return None if self.eval_by is None else [label_of(row.get(self.eval_by)) for row in self.rows]

    @cached_property
    def verdict(self) -> Verdict | None:
        """The verdict on pairs.

        Raises:
            UserError: No pair has two finite rewards.
        """
        if self.kind != PAIRS:
            return None
        lengths_N2 = None if self.lengths is None else np.array(self.lengths).reshape(-1, 2)
        return judge_pairs(np.array(self.rewards).reshape(-1, 2), lengths_N2, self.unit, self.groups)

    @cached_property
    def best_of_n(self) -> BestOfN | None:
        """The verdict on rows of several answers.

        Raises:
            UserError: No row has finite rewards only, or a subset Ties is not as its rule needs it.
        """
        if self.kind != ANSWERS:
            return None
        ids = [str(row.get("id", "")) for row in self.rows]
        answers = [Answers(*both, id=own) for both, own in zip(self.rewards, ids, strict=True)]
        return judge_best_of_n(answers, self.groups)

    @cached_property
    def finite(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """All finite rewards [M], their lengths [M] where they are known, and whether each is of a chosen answer."""
        of = [
            (reward, chosen)
            for both in self.rewards
            for chosen, some in zip((1, 0), both, strict=True)
            for reward in some
        ]
        reward_M, chosen_M = np.array(of, dtype=float).reshape(-1, 2).T
        kept_M = np.isfinite(reward_M)
        lengths_M = None
        if self.lengths is not None:
            lengths_M = np.array([length for both in self.lengths for some in both for length in some])[kept_M]
        return reward_M[kept_M], lengths_M, chosen_M[kept_M] > 0


def read_scored(path: Path, eval_by: str | None = None) -> ScoredRows:
    """Read a JSON Lines or Parquet file of rows with rewards.

    Lengths are tokens where every row says how many (``tokens_chosen``, ``tokens_rejected`` or ``tokens``), else the
    characters of the texts, where they are there.

    Args:
        eval_by: The column whose labels group the rows; by default ``subset``, where there is one.

    Raises:
        UserFileError: There is no such file.
        UserError: It is of another kind, has no rows, no rewards, rewards that are no numbers, or no such column.
    """
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"{path} has no rows. Give the file that `trl-tpu score --output` wrote.")
    reward_columns = next((each for each in _SHAPES if all(column in rows[0] for column in each)), None)
    if reward_columns is None:
        raise UserError(
            f"{path} has no rewards: its columns are {', '.join(rows[0])}. Score it first: `trl-tpu score "
            "--output FILE` writes `reward_chosen` and `reward_rejected`, `reward` or `rewards`."
        )
    scored = [(number, row) for number, row in enumerate(rows) if _is_scored(row, reward_columns)]
    holds_lists = any(isinstance(row[reward_columns[0]], list) for _, row in scored[:1])
    rewards = [
        _rewards_of(row, reward_columns, holds_lists, f"{path}, row {number}") for number, row in enumerate(rows)
    ]
    if eval_by is None and scored and all(DEFAULT_GROUPS in row for _, row in scored):
        eval_by = DEFAULT_GROUPS
    for number, row in scored:
        if eval_by is not None and eval_by not in row:
            raise UserError(f"`eval_by`: row {number} of {path} has no {eval_by!r}; it has {', '.join(row)}.")
    lengths, unit = _lengths(rows, reward_columns, rewards)
    kind = REWARDS if len(reward_columns) == 1 else ANSWERS if holds_lists else PAIRS
    return ScoredRows(path.name, kind, rows, rewards, lengths, unit, eval_by)


def _rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise UserFileError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        try:
            yield from pq.read_table(path).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from error
        return
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} is none of {', '.join(SUFFIXES)}: give a file of rows that were scored.")
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is no JSON: {error}. Correct or remove it.") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number} is no JSON object: a line is to be a row, with its columns.")
            yield row


def _is_scored(row: Row, columns: Sequence[str]) -> bool:
    """Return whether a row has any reward; one that has not may lack other columns too, and have null for lists."""
    return any(row.get(column) is not None for column in columns)


def _rewards_of(row: Row, columns: Sequence[str], holds_lists: bool, where: str) -> tuple[list[float], list[float]]:
    """Return the rewards of the chosen and of the rejected answers; null is nan."""

    found = [_numbers(row.get(column), f"{where}: `{column}`") for column in columns]
    if len(found) == 1:
        return found[0], []
    if not _is_scored(row, columns):
        return found[0], found[1]
    if any(isinstance(row.get(column), list) != holds_lists for column in columns):
        raise UserError(
            f"{where}: its rewards are to be {'lists' if holds_lists else 'numbers'}, as in the first row."
        )
    return found[0], found[1]


def _numbers(given: Any, what: str) -> list[float]:
    values = given if isinstance(given, list) else [given]
    if not values or any(isinstance(each, bool) or not isinstance(each, int | float | None) for each in values):
        raise UserError(f"{what} is to be a number or a list of numbers, not {json.dumps(given, default=str)[:80]}.")
    return [math.nan if each is None else float(each) for each in values]


def _lengths(
    rows: list[Row], columns: Sequence[str], rewards: list[tuple[list[float], list[float]]]
) -> tuple[list[tuple[list[int], list[int]]] | None, str]:
    """Return the lengths of all answers, and what they count: tokens, if every row with rewards has them."""
    unscored = [0], [0] * (len(columns) - 1)
    for unit, measure in (("tokens", _tokens), ("characters", _characters)):
        lengths = []
        for row, scored in zip(rows, rewards, strict=True):
            own = [measure(row, column) for column in columns]
            both = (own[0], own[1] if len(own) == 2 else []) if _is_scored(row, columns) else unscored
            if [len(some) for some in both] != [len(some) for some in scored]:
                break
            lengths.append(both)
        else:
            return lengths, unit
    return None, "tokens"


def _tokens(row: Row, column: str) -> list[int]:
    given = row.get(_COLUMNS[column][1])
    values = given if isinstance(given, list) else [given]
    return [each for each in values if isinstance(each, int)]


def _characters(row: Row, column: str) -> list[int]:
    text = next((row[name] for name in _COLUMNS[column][0] if row.get(name) is not None), None)
    if text is None:
        return []
    return [len(text_of(each)) for each in text] if isinstance(row.get(column), list) else [len(text_of(text))]


def text_of(dialogue: Any) -> str:
    """Return the text of a dialogue: itself, or what its messages say, a line or more each."""
    if isinstance(dialogue, str):
        return dialogue
    if isinstance(dialogue, dict):
        content = dialogue.get("content")
        return content if isinstance(content, str) else text_of(content) or str(dialogue.get("text") or "")
    return "\n".join(map(text_of, dialogue)) if isinstance(dialogue, list) else ""
