"""Rows to score, one by one as they are read: from a file, a folder, the Hub or the standard input."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow.parquet as pq

from trl_tpu.errors import UserError
from trl_tpu.scripts import datafiles

STDIN = "-"
_LINES = (".jsonl", ".ndjson")

Rows = Iterator[dict[str, Any] | UserError]
"""Rows; in the place of a line that is no JSON object, what is wrong with it."""


def open_rows(name: str, config: str | None = None, split: str | None = None) -> tuple[Rows, int | None]:
    """Find the rows that a user names, and how many there are, if that is known; they are read as they are asked for.

    Args:
        name: ``-`` for JSON Lines from the standard input, else as for `datafiles.load`.
        config: The configuration of a dataset.
        split: The split of a dataset; may be left out where there is only one.

    Raises:
        UserError: There are none of that name, or several splits and none is chosen.
    """
    if name == STDIN:
        return _lines(sys.stdin.buffer, "the standard input"), None
    path = Path(name).expanduser()
    if path.is_file() and datafiles.suffix_of(path) in _LINES and split in (None, "train"):
        return _lines(_read(path), name), sum(1 for line in _read(path) if line.strip())
    splits = datafiles.load(name, name=config, streaming=True)
    if split is None and len(splits) > 1:
        raise UserError(f"{name} has several splits: {', '.join(splits)}. Choose one with `--dataset_split`.")
    rows = datafiles.pick_split(splits, split or next(iter(splits)), name)
    return _dataset_rows(rows, name), _count_rows(rows, path)


def _read(path: Path) -> Iterator[bytes]:
    """Read the lines of a file that may be compressed.

    Raises:
        UserError: It cannot be read.
    """
    try:
        with fsspec.open(str(path), mode="rb", compression="infer") as file:
            yield from file
    except (OSError, EOFError, ValueError) as error:  # each compression has errors of its own, and none names the file
        raise UserError(f"{path} cannot be read ({error}). Correct the file.") from error


def _lines(file: Iterable[bytes], what: str) -> Rows:
    """Read JSON Lines; rows keep their own keys, as no dataset of one schema would let them."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:  # of JSON, and of UTF-8
            yield UserError(f"{what} is broken: line {number}: {error}. Correct the line.")
            continue
        is_row = isinstance(row, dict)
        yield row if is_row else UserError(f"{what} is broken: line {number}: a row must be a JSON object.")


def _dataset_rows(rows: datasets.IterableDataset, name: str) -> Rows:
    with datafiles.naming_bad_lines(name):
        yield from rows


def _count_rows(rows: datasets.IterableDataset, path: Path) -> int | None:
    if path.is_file() and path.suffix.lower() == ".parquet":
        return pq.ParquetFile(path).metadata.num_rows
    known = (rows.info.splits or {}).get(str(rows.split))
    return known.num_examples if known else None
