"""A JSON Lines file of rows that is written as they come, and has its name when it holds all of them."""

import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trl_tpu.errors import UserError, UserFileError

logger = logging.getLogger(__name__)


def check(output: str, dataset: str | None) -> None:
    """Check, before any work is done, that an output can be written and is no part of a local dataset.

    Raises:
        UserError: It is the dataset, or in its folder, or cannot be written.
        UserFileError: There is no folder for it.
    """
    path = _path(output)
    if not path.parent.is_dir():
        raise UserFileError(f"`output`, {output}: there is no folder {path.parent}. Make it, or name another.")
    written = [path] if _is_special(path) else [path.parent, path]  # a finished file takes the place of another
    if path.is_dir() or not all(os.access(each, os.W_OK) for each in written if each.exists()):
        raise UserError(f"`output`, {output}, cannot be written: name a file in a folder where you may write.")
    source = None if dataset is None else Path(dataset).expanduser()
    if source is None or not source.exists():
        return
    if source.is_dir() and path.is_relative_to(source.resolve()):
        raise UserError(f"`output`, {output}, lies in the folder of the dataset, {dataset}: name a file elsewhere.")
    if path.exists() and path.samefile(source):
        raise UserError(f"`output` is the dataset itself, {dataset}: name another file.")


@contextmanager
def opened(output: str | None) -> Iterator[TextIO | None]:
    """Open the file for the rows; it gets its name when all are written, and is ``OUTPUT.partial`` until then.

    What is there and no ordinary file, a pipe say, is written to itself.
    """
    if output is None:
        yield None
        return
    path = _path(output)
    if _is_special(path):
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
    except BaseException:
        logger.warning(f"Not all rows are written; those that are, are in {partial}.")
        raise
    partial.replace(path)


def _path(output: str) -> Path:
    path = Path(output).expanduser()
    return path if _is_special(path) else path.resolve()  # the file that a link leads to


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def json_line(row: dict[str, Any]) -> str:
    """Spell a row as a line of JSON, with null for numbers that are not finite, and text for what JSON has not."""
    return json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False, default=str)


def _without_nan(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, at any depth: JSON has none."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
