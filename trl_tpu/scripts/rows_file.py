"""A file of rows that is written in chunks, has its name when it holds all of them, and can be resumed.

Until then the chunks are files in the folder ``OUTPUT.partial``, each complete or not there: JSON Lines, or Parquet
where the output is Parquet and JSON would change a value. Their names have a digest of the rows that they were made
from and of the settings, so that a command that is started again keeps the chunks of an earlier start, or refuses to
go on with what was made from other rows.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from trl_tpu.errors import UserError, UserFileError

logger = logging.getLogger(__name__)

_PARQUET = ".parquet"


def check(output: str, dataset: str | None) -> None:
    """Check, before any work is done, that an output can be written and is no part of a local dataset.

    Raises:
        UserError: It is the dataset, or in its folder.
        UserFileError: It is a folder or a pipe, or there is no folder for it.
    """
    path = Path(output).expanduser().resolve()
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise UserFileError(f"`output`, {output}, cannot be written: name a file in a folder that is there.")
    if dataset is not None and path.is_relative_to(Path(dataset).expanduser().resolve()):
        raise UserError(f"`output`, {output}, is the dataset itself or in its folder: name a file elsewhere.")


class RowsFile:
    """The output of a command: a context, at whose end the file gets its name, unless an error ends it.

    Args:
        output: The file; Parquet where its name ends so, else JSON Lines.
        settings: What the rows depend on, beside those that they are made from.
        chunk: Rows are written and kept in chunks of this many.
    """

    def __init__(self, output: str, settings: Mapping[str, Any], chunk: int) -> None:
        self._path = Path(output).expanduser().resolve()  # the file that a link leads to
        self._settings = json.dumps(settings)
        self._chunk = chunk
        self._chunks: list[Path] = []
        self._changed: set[str] = set()  # columns of which JSON cannot hold all values
        self._folder = self._path.with_name(f"{self._path.name}.partial")

    def kept(self, rows: Iterator[Any]) -> Iterator[list[dict[str, Any]]]:
        """Read the chunks of an earlier start, and as many of the rows that they were made from.

        Raises:
            UserError: They were made from other rows, or by another command.
        """
        for found in sorted(self._folder.glob("*-*[!d]")):  # all but .unfinished
            given = list(islice(rows, self._chunk))
            written = _read(found)
            if found.stem != self._file_of(given).stem or len(written) != len(given):
                raise UserError(
                    f"{self._folder} cannot be resumed: its rows were made from other data, by another model or with "
                    "other arguments. Give the same, or delete the folder to begin anew."
                )
            self._chunks.append(found)
            yield written

    def write(self, given: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
        """Write a chunk.

        Args:
            given: The rows that it was made from.
            rows: The rows to write.
        """
        self._folder.mkdir(exist_ok=True)
        chunk = self._file_of(given)
        unfinished = chunk.with_suffix(".unfinished")
        as_json = list(map(_as_json, rows))
        both = zip(rows, as_json, strict=True)
        changed = {name for row, spelled in both for name, value in row.items() if spelled[name] != value}
        if changed and self._path.suffix.lower() == _PARQUET:
            with suppress(pa.ArrowException, UnicodeEncodeError):  # of what Parquet cannot hold either
                pq.write_table(pa.Table.from_struct_array(pa.array(rows)), unfinished)
                chunk, changed = chunk.with_suffix(_PARQUET), set()
        if chunk.suffix != _PARQUET:
            unfinished.write_bytes(b"".join(map(json_line, as_json)))
        if new := changed - self._changed:
            self._changed |= new
            logger.warning(
                f"JSON cannot hold all values of {', '.join(sorted(new))}: numbers that are not finite are written as "
                "null, and other values as text. Parquet output keeps numbers, times and bytes."
            )
        unfinished.replace(chunk)
        self._chunks.append(chunk)

    def _file_of(self, given: Sequence[Any]) -> Path:
        """Return the name of the next chunk."""
        digest = hashlib.sha256(self._settings.encode())
        for row in given:
            digest.update(json.dumps(row, default=str).encode())
        return self._folder / f"{len(self._chunks):08}-{digest.hexdigest()[:16]}.jsonl"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
        else:
            logger.warning(f"Not all rows are written; those that are, are in {self._folder}.")

    def _finish(self) -> None:
        whole = self._folder / f"whole{_PARQUET}"
        if self._path.suffix.lower() == _PARQUET:
            self._to_parquet(whole)
        else:
            with whole.open("wb") as file:
                for chunk in self._chunks:
                    file.write(chunk.read_bytes())
        whole.replace(self._path)
        shutil.rmtree(self._folder)

    def _to_parquet(self, parquet: Path) -> None:
        """Write the chunks as Parquet, a row group for each, which is all that is in memory at a time."""
        try:
            # of all keys of a chunk's rows, where a table would look at the first row alone
            schemas = (pa.Table.from_struct_array(pa.array(_read(chunk))).schema for chunk in self._chunks)
            schema = pa.unify_schemas(list(dict.fromkeys(schemas)), promote_options="permissive")
            with pq.ParquetWriter(parquet, schema) as writer:
                for chunk in self._chunks:
                    writer.write_table(pa.Table.from_pylist(_read(chunk), schema=schema), row_group_size=self._chunk)
        except (pa.ArrowException, UnicodeEncodeError) as error:
            raise UserError(
                f"The rows cannot be written as Parquet, whose columns have one type each: {error}. All of them are "
                f"in {self._folder}; keep those, or name an output that ends with .jsonl."
            ) from error


def json_line(row: dict[str, Any]) -> bytes:
    """Return a row of what JSON can hold as a line of it."""
    # half of a pair of surrogates, which a row may have as \\ud800, is no text that a file holds
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with null for numbers that are not finite, and text for what JSON does not have."""
    return json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)


def _read(chunk: Path) -> list[dict[str, Any]]:
    if chunk.suffix == _PARQUET:
        return pq.ParquetFile(chunk).read().to_pylist()
    with chunk.open("rb") as lines:
        return [json.loads(line) for line in lines]
