"""Warnings about raw rows that are accepted and probably not meant, each logged once with the number of its rows."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from datasets import Dataset

from ..errors import UserError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

TRAPS = "trl_tpu_traps"
"""The column in which tokenizing leaves each row's traps, one a line, until `warn_of_traps` has counted them."""


_QUESTIONS = ("question", "instruction", "input", "query", "context", "system", "history", "conversations")

_SHORTEST_PROMPT = 10  # characters; answers may begin with fewer by chance

_WARNINGS = {
    "question": "there is no `prompt`, and the text of {} is not read. Make it the prompt, "
    "`dataset.rename_column(name, 'prompt')`, or join the columns into a column `prompt`",
    "prompt": "all answers begin with the `prompt`, so it is read twice. Drop it, `dataset.remove_columns('prompt')`",
    "form": "there are {}. Convert the rows yourself if that is wrong",
    "same": "all answers are the same tokens, so they teach nothing. Remove such rows",
    "bos": "the text begins with {}, and the tokenizer adds another. Remove it from the text",
    "eos": "the text ends with {} and white space, so another is added. Strip the text",
}


def find_traps(row: Row, forms: list[str], answers: list[Any], ids: list[list[int]], tokenizer: Any) -> str:
    """Return the traps of a row, one a line: the key of a warning, and a name for its text.

    Args:
        row: A converted row.
        forms: From `convert_row`.
        answers: Its answers, texts or messages.
        ids: Their token ids, with the prompt's.
        tokenizer: Its tokenizer.
    """
    prompt, eos, bos = row.get("prompt") or "", tokenizer.eos_token, tokenizer.bos_token
    traps, is_text = [f"form {form}" for form in forms], all(isinstance(answer, str) for answer in answers)
    if not prompt and (is_text or all(message["role"] == "assistant" for answer in answers for message in answer)):
        said = ["\n".join(_strings(answer)) for answer in answers]
        unread = [key for key in _QUESTIONS if any(text not in one for text in _strings(row.get(key)) for one in said)]
        traps += [f"question {key}" for key in unread]
    if is_text:
        begin = prompt.strip()
        is_double = len(begin) >= _SHORTEST_PROMPT and all(answer.lstrip().startswith(begin) for answer in answers)
        if bos and (prompt or answers[0]).startswith(bos) and [*ids[0][:2]] == [tokenizer.bos_token_id] * 2:
            traps.append(f"bos {bos}")
        if eos and any(answer.rstrip().endswith(eos) and not answer.endswith(eos) for answer in answers):
            traps.append(f"eos {eos}")
    else:
        is_double = bool(prompt) and all(answer[: len(prompt)] == prompt for answer in answers)
    return "\n".join(traps + ["prompt twice"] * is_double)


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a value, at any depth."""
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def warn_of_traps(dataset: Dataset, name: str) -> Dataset:
    """Log each kind of trap with the number of rows that have it, and return the dataset without their column."""
    rows_of: dict[str, dict[int, None]] = defaultdict(dict)
    names_of: dict[str, dict[str, None]] = defaultdict(dict)  # both in order
    for index, traps in enumerate(dataset.with_format(None)[TRAPS]):
        for key, trap in (line.split(" ", 1) for line in traps.splitlines()):
            rows_of[key][index] = names_of[key][trap] = None
    for key, rows in rows_of.items():
        where = f"{name} dataset: in {len(rows)} of {len(dataset)} rows (the first is row {next(iter(rows))})"
        warn(key, names_of[key], where)
    return dataset.remove_columns(TRAPS)


def warn(key: str, names: Iterable[str], where: str) -> None:
    """Log a kind of trap; ``where`` begins the message."""
    logger.warning(f"{where}, {_WARNINGS[key].format(', '.join(names))}.")


def report_equal_answers(row: Mapping[str, Any], count: int, rows: int, first: int, name: str) -> None:
    """Warn of rows whose answers are the same tokens.

    Args:
        row: The first of them.
        count: How many there are,
        rows: of all rows of the dataset.
        first: The number of ``row``.
        name: The dataset's.

    Raises:
        UserError: Most rows are such.
    """
    roles = sorted(set(_roles_in([*row.values()])))
    reason = f"the chat template may ignore some of the roles {roles}" if roles else "the texts may be equal"
    text = (
        f"{name} dataset: in {count} of {rows} pairs, chosen and rejected are the same tokens (first in row {first})"
    )
    if count > rows / 2:
        raise UserError(f"{text}, so hardly anything can be learned: {reason}. Correct the rows or the template.")
    logger.warning(f"{text}: {reason}. They are kept, but teach nothing.")


def _roles_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and ("role" in value or "from" in value):
        yield str(value.get("role") or value.get("from"))
    for each in value if isinstance(value, list) else ():
        yield from _roles_in(each)
