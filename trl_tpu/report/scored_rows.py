"""Verdicts on files: of scored rows, and as written by training."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import quote

import numpy as np
import pyarrow.parquet as pq

from ..data.checks import check_one_form
from ..errors import UserError
from ..evaluation.judge import (
    Answers,
    BestOfN,
    grades_beside_rewards,
    judge_best_of_n,
    judge_rankings,
    parts_of,
    rankings_of,
)
from ..evaluation.reward_sums import label_of
from ..evaluation.verdict import Verdict, judge_pairs

VERDICT_FILE = "verdict.json"
_KINDS: dict[str, type[Verdict] | type[BestOfN]] = {"pairs": Verdict, "best_of_n": BestOfN}


def verdict_name(dataset: str) -> str:
    """Return the name of the file for a verdict: on one of several datasets, or on the only one, without a name.

    `urllib.parse.unquote` gives the dataset's name back.
    """
    return f"verdict-{quote(dataset, safe='')}.json" if dataset else VERDICT_FILE


def verdict_text(verdict: Verdict | BestOfN) -> str:
    """Return a verdict as JSON, with null for what is not finite."""
    kind = next(name for name, type_ in _KINDS.items() if isinstance(verdict, type_))
    spelled = json.dumps({"kind": kind} | dataclasses.asdict(verdict))
    content = json.loads(spelled, parse_constant=lambda _: None)
    return f"{json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)}\n"


def write_verdict(verdict: Verdict | BestOfN, path: Path) -> None:
    """Write a verdict; the file is whole, or as it was."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(verdict_text(verdict), encoding="utf-8")
    partial.replace(path)


def read_verdict(path: Path) -> Verdict | BestOfN:
    """Read a verdict back.

    Raises:
        UserError: The file is of another making.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        made: Verdict | BestOfN = _made(_KINDS[content.pop("kind")], content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} cannot be read as a verdict ({reason}). Remove it, and evaluate again.") from error
    return made


def _made(kind: Any, value: Any) -> Any:
    """Return a value of JSON as one of a type: null is nan for a number that has to be there."""
    if value is None:
        return math.nan if kind is float else None
    if dataclasses.is_dataclass(kind):
        fields = get_type_hints(kind)
        return kind(**{name: _made(fields[name], each) for name, each in value.items()})  # type: ignore[operator]
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(_made(parts[0], each) for each in value)
    if get_origin(kind) is dict:
        return {name: _made(parts[1], each) for name, each in value.items()}
    return _made(parts[0], value) if parts else value  # of `X | None` it is X


Row = dict[str, Any]

_REWARDS = ("reward_chosen", "reward_rejected")
_GROUPS = ("attribute", "subset")  # which `parts_of` writes, and RewardBench


@dataclass(frozen=True)
class ScoredRows:
    """Rows with rewards, as they are in their file, and the verdict on these: on pairs, or on several answers."""

    rows: list[Row]
    verdict: Verdict | BestOfN


def read_scored(path: Path, eval_by: str | None = None) -> ScoredRows:
    """Read a JSON Lines or Parquet file of rows with rewards, and judge them.

    Lengths are known where every scored row has ``tokens_chosen`` and ``tokens_rejected``.

    Args:
        eval_by: A column that groups the rows; by default ``subset``, where there is one.

    Raises:
        UserError: The file cannot be read, has no rewards of chosen and of rejected answers, not one finite, or no
            such column.
    """
    read = _rows(path)
    rows = [dict(part) for row in read for part in parts_of(row)]
    columns = {name for row in read for name in row} | {name for row in rows for name in row}
    if "step_rewards" not in columns:
        check_one_form(columns, str(path))
    grades = [] if columns.issuperset(_REWARDS) else [grades_beside_rewards(row) for row in rows]
    if not any(grades) and not columns.issuperset(_REWARDS):
        raise UserError(
            f"{path} does not say which answer is better: its columns are {', '.join(sorted(columns))}. Score pairs, "
            f"which gives {' and '.join(_REWARDS)}, completions with scores or ranks, or steps with labels, 0 or 1: "
            "`trl-tpu score --output`."
        )
    if eval_by is not None and eval_by not in columns:
        raise UserError(f"{path} has no {eval_by!r}; it has {', '.join(sorted(columns))}.")
    eval_by = eval_by or next((name for name in _GROUPS if name in columns), None)
    groups = None if eval_by is None else [label_of(row.get(eval_by)) for row in rows]
    if grades:
        ranked = rankings_of([_numbers(row.get("rewards"), path) for row in rows], grades)
        return ScoredRows(rows, judge_rankings(*ranked, groups=groups))
    rewards = [[_numbers(row.get(column), path) for column in _REWARDS] for row in rows]
    if any(isinstance(row.get(column), list) for row in rows for column in _REWARDS):
        ids = [str(row.get("id", "")) for row in rows]
        answers = [Answers(chosen, rejected, id_) for (chosen, rejected), id_ in zip(rewards, ids, strict=True)]
        return ScoredRows(rows, judge_best_of_n(answers, groups))
    rewards_N2 = np.array(rewards).reshape(-1, 2)
    tokens_N2 = np.array([[row.get("tokens_chosen"), row.get("tokens_rejected")] for row in rows], dtype=np.float64)
    of = "steps" if "step_rewards" in columns else "pairs"
    are_known = not np.isnan(tokens_N2[np.isfinite(rewards_N2).all(axis=1)]).any()
    return ScoredRows(rows, judge_pairs(rewards_N2, tokens_N2 if are_known else None, groups, of=of))


def _rows(path: Path) -> list[Row]:
    number, rows = 0, []
    try:
        if path.suffix.lower() == ".parquet":
            return pq.read_table(path).to_pylist()
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):  # noqa: B007  # for the message
                rows += [dict(json.loads(line))] if line.strip() else []
    except (OSError, ValueError, TypeError) as error:
        where = f", line {number}," if number else ""
        raise UserError(f"{path}{where} cannot be read as rows: {error}.") from error
    return rows


def _numbers(value: Any, path: Path) -> list[float]:
    """Return the rewards of a row's answers; null, for one or for all of them, is nan."""
    try:
        numbers: list[float] = np.atleast_1d(np.array(value, dtype=np.float64)).tolist()
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: a reward is to be a number, or a list of numbers, not {value!r:.80}.") from error
    return numbers or [math.nan]


def text_of(dialogue: Any) -> str:
    """Return the text of a dialogue: itself, or what its messages say, a line or more each."""
    if isinstance(dialogue, str):
        return dialogue
    if isinstance(dialogue, dict):
        content = dialogue.get("content")
        return content if isinstance(content, str) else text_of(content) or str(dialogue.get("text") or "")
    return "\n".join(map(text_of, dialogue)) if isinstance(dialogue, list) else ""
