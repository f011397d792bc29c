"""Traps: raw rows that are valid but probably a mistake. Each kind of trap is logged once, with its number of rows."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from datasets import Dataset

from ..errors import UserError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

TRAPS = "trl_tpu_traps"
"""Column for each row's traps, one per line. Tokenization adds it, and `warn_of_traps` removes it."""


_QUESTION_COLUMNS = ("question", "instruction", "input", "query", "context", "system", "history", "conversations")

_SHORTEST_PROMPT = 10  # characters; answers may begin with a shorter prompt by chance

_WARNINGS = {
    "question": "the column `prompt` is missing, and the text of {} is not read. Make it the prompt, "
    "`dataset.rename_column(name, 'prompt')`, or join the columns into a column `prompt`",
    "prompt": "all answers begin with the `prompt`, so the prompt is read twice. Drop the column, "
    "`dataset.remove_columns('prompt')`",
    "form": "there are {}. Convert the rows yourself if that is wrong",
    "same": "all answers have the same tokens, so they teach nothing. Remove such rows",
    "bos": "the text begins with {}, and the tokenizer adds another. Remove it from the text",
    "eos": "the text ends with {} and white space, so another is added. Strip the text",
}


def find_traps(row: Row, forms: list[str], answers: list[Any], ids: list[list[int]], tokenizer: Any) -> str:
    """Return the traps of a row, one per line: the key of a warning, and a name to insert into its text.

    Args:
        row: A converted row.
        forms: Descriptions of the row's conversions, from `convert_row`.
        answers: The row's answers, as texts or messages.
        ids: Token ids of each answer with its prompt.
        tokenizer: The tokenizer of these ids.
    """
    prompt, eos, bos = row.get("prompt") or "", tokenizer.eos_token, tokenizer.bos_token
    traps, is_text = [f"form {form}" for form in forms], all(isinstance(answer, str) for answer in answers)
    if not prompt and (is_text or all(message["role"] == "assistant" for answer in answers for message in answer)):
        texts = ["\n".join(_strings(answer)) for answer in answers]
        unread = [
            key
            for key in _QUESTION_COLUMNS
            if any(part not in text for part in _strings(row.get(key)) for text in texts)
        ]
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
    """Yield the texts in a value, at any nesting depth."""
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


def warn_of_traps(dataset: Dataset, name: str) -> Dataset:
    """Log each kind of trap with its number of rows, and return the dataset without the column of traps."""
    rows_of: dict[str, dict[int, None]] = defaultdict(dict)
    names_of: dict[str, dict[str, None]] = defaultdict(dict)  # dicts as ordered sets
    for index, traps in enumerate(dataset.with_format(None)[TRAPS]):
        for key, trap in (line.split(" ", 1) for line in traps.splitlines()):
            rows_of[key][index] = names_of[key][trap] = None
    for key, rows in rows_of.items():
        where = f"{name} dataset: in {len(rows)} of {len(dataset)} rows (the first is row {next(iter(rows))})"
        warn(key, names_of[key], where)
    return dataset.remove_columns(TRAPS)


def warn(key: str, names: Iterable[str], where: str) -> None:
    """Log one kind of trap, for the rows that ``where`` names."""
    logger.warning(f"{where}, {_WARNINGS[key].format(', '.join(names))}.")


def report_equal_answers(row: Mapping[str, Any], count: int, rows: int, first: int, name: str) -> None:
    """Warn of rows with equal answers (the same tokens).

    Args:
        row: The first row with equal answers.
        count: Number of rows with equal answers.
        rows: Number of rows in the dataset.
        first: Index of ``row``.
        name: Name of the dataset.

    Raises:
        UserError: More than half of the rows have equal answers.
    """
    roles = sorted(set(_roles_in([*row.values()])))
    reason = f"the chat template may ignore some of the roles {roles}" if roles else "the texts may be equal"
    text = (
        f"{name} dataset: in {count} of {rows} pairs, chosen and rejected have the same tokens (first in row {first})"
    )
    if count > rows / 2:
        raise UserError(f"{text}, so hardly anything can be learned: {reason}. Correct the rows or the template.")
    logger.warning(f"{text}: {reason}. They are kept, but teach nothing.")


def _roles_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and ("role" in value or "from" in value):
        yield str(value.get("role") or value.get("from"))
    for item in value if isinstance(value, list) else ():
        yield from _roles_in(item)
