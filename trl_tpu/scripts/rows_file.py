"""A file of rows that is written as they come, has its name when it holds all of them, and can be gone on with.

Until then the rows are in ``OUTPUT.partial``, as JSON Lines, and what was asked for is in ``OUTPUT.partial.json``. A
command that is started again keeps the whole windows of rows that are there, so that the file is the same to the byte:
within a window rewards depend, in their last bits, on what is computed beside them.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from trl_tpu.errors import UserError, UserFileError
from trl_tpu.report.verdict_file import null_for_nonfinite

logger = logging.getLogger(__name__)

_PARQUET = ".parquet"


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


class RowsFile:
    """The output of a command. What is there and no ordinary file, a pipe say, is written to itself, and never kept.

    Args:
        output: The file; Parquet where its name ends so, else JSON Lines.
        asked: What the rows depend on. Rows of another command are not gone on with.
        window: Rows are kept in multiples of this.

    Raises:
        UserError: The partial file is of another command.
    """

    def __init__(self, output: str, asked: Mapping[str, Any], window: int) -> None:
        self._path = _path(output)
        self._asked = json.loads(json.dumps(asked))  # as it is read back
        self._window = window
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._note = self._path.with_name(f"{self._path.name}.partial.json")
        self._is_special = _is_special(self._path)
        self.settled: dict[str, Any] = {}
        """What an earlier start of the command has settled, which holds for the rows to come too."""
        self.kept = 0
        """Rows that are there already."""
        self._end = 0  # in bytes
        if not self._is_special:
            self._look_at_what_is_there()

    def _look_at_what_is_there(self) -> None:
        noted: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            noted = json.loads(self._note.read_text(encoding="utf-8"))
        if not self._partial.is_file() or not isinstance(noted, dict) or "asked" not in noted:
            return  # of an older version, or of nobody
        then, now = noted["asked"], self._asked
        differing = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        if differing:
            told = "; ".join(f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in differing)
            raise UserError(
                f"{self._partial} holds rows of another command, which cannot be gone on with: {told:.400}. Give the "
                f"same arguments, or delete {self._partial} to begin anew."
            )
        self.settled = noted["settled"]
        ends = [0]  # of whole windows
        rows = 0
        with self._partial.open("rb") as file:
            position = 0
            for line in file:
                position += len(line)
                if not line.endswith(b"\n"):
                    break  # it was cut off
                rows += 1
                if rows % self._window == 0:
                    ends.append(position)
        self.kept, self._end = (len(ends) - 1) * self._window, ends[-1]

    def kept_rows(self) -> Iterator[dict[str, Any]]:
        """Read the rows that are kept."""
        if not self.kept:
            return
        with self._partial.open("rb") as file:
            for _ in range(self.kept):
                yield json.loads(file.readline())

    def settle(self, **values: Any) -> None:
        """Note what was settled on the way, for a later start of the command."""
        if values != self.settled and not self._is_special:
            self.settled = values
            self._write_note()

    def _write_note(self) -> None:
        aside = self._note.with_suffix(".writing")
        aside.write_text(json.dumps({"asked": self._asked, "settled": self.settled}), encoding="utf-8")
        aside.replace(self._note)

    def write(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Write rows after those that are kept, and yield each; when all are written, the file gets its name.

        Raises:
            UserError: Rows that no Parquet file holds, as their columns are of several types.
        """
        if self._is_special:
            with self._path.open("w", encoding="utf-8") as file:
                yield from self._written(rows, file)
            return
        self._write_note()
        try:
            with self._partial.open("r+" if self.kept else "w", encoding="utf-8") as file:
                file.truncate(self._end)
                file.seek(self._end)
                yield from self._written(rows, file)
        except BaseException:
            logger.warning(f"Not all rows are written; those that are, are in {self._partial}.")
            raise
        if self._path.suffix.lower() == _PARQUET:
            aside = self._path.with_name(f"{self._path.name}.partial{_PARQUET}")
            _to_parquet(self._partial, aside, self._window)
            aside.replace(self._path)
            self._partial.unlink()
        else:
            self._partial.replace(self._path)
        self._note.unlink()

    def _written(self, rows: Iterator[dict[str, Any]], file: TextIO) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(rows, start=1):
            print(json_line(row), file=file)
            if number % self._window == 0:
                file.flush()
            yield row


def _path(output: str) -> Path:
    path = Path(output).expanduser()
    return path if _is_special(path) else path.resolve()  # the file that a link leads to


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def json_line(row: dict[str, Any]) -> str:
    """Spell a row as a line of JSON, with null for numbers that are not finite, and text for what JSON has not."""
    spelled = partial(json.dumps, null_for_nonfinite(row), allow_nan=False, default=str)
    line = spelled(ensure_ascii=False)
    # half of a pair of surrogates, which a row may have as \\ud800, is no text that a file holds
    return line if _is_text(line) else spelled()


def _is_text(line: str) -> bool:
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- Parquet


def _to_parquet(lines: Path, parquet: Path, window: int) -> None:
    """Write JSON Lines as Parquet, a row group for each window, which is all that is in memory at a time."""
    try:
        schemas = (table.schema for table in _tables(lines, window, None))
        schema = pa.unify_schemas(list(dict.fromkeys(schemas)), promote_options="permissive")
        with pq.ParquetWriter(parquet, schema) as writer:
            for table in _tables(lines, window, schema):
                writer.write_table(table, row_group_size=window)
    except (pa.ArrowException, UnicodeEncodeError) as error:
        parquet.unlink(missing_ok=True)
        raise UserError(
            f"The rows cannot be written as Parquet, whose columns have one type each: {error}. All of them are in "
            f"{lines}, as JSON Lines; keep that, or name an output that ends with .jsonl."
        ) from error


def _tables(lines: Path, window: int, schema: pa.Schema | None) -> Iterator[pa.Table]:
    rows: list[dict[str, Any]] = []
    with lines.open(encoding="utf-8") as file:
        for line in file:
            rows.append(json.loads(line))
            if len(rows) == window:
                yield _table(rows, schema)
                rows = []
    if rows:
        yield _table(rows, schema)


def _table(rows: list[dict[str, Any]], schema: pa.Schema | None) -> pa.Table:
    if schema is not None:
        return pa.Table.from_pylist(rows, schema=schema)
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow would look at the first row alone
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
