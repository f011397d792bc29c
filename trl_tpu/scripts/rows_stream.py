"""Rows to score, one by one as they are read: from a file, a folder, the Hub or the standard input."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import fsspec
import pyarrow.parquet as pq

from trl_tpu.errors import UserError
from trl_tpu.scripts import datafiles

STDIN = "-"
_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Source:
    """Rows that are still to be read.

    Args:
        rows: The rows; in the place of a line that is no JSON object, what is wrong with it.
        count: How many there are; None where nobody knows before the end.
    """

    rows: Iterable[dict[str, Any] | UserError]
    count: int | None = None


def open_rows(name: str, config: str | None = None, split: str | None = None) -> Source:
    """Find the rows that a user names; they are read as they are asked for.

    Args:
        name: ``-`` for JSON Lines from the standard input, else as for `datafiles.load`.
        config: The configuration of a dataset.
        split: The split of a dataset; may be left out where there is only one.

    Raises:
        UserError: There are none of that name, or several splits and none is chosen.
    """
    if name == STDIN:
        return Source(_lines(sys.stdin.buffer, "the standard input"))
    path = Path(name).expanduser()
    if path.is_file() and datafiles.suffix_of(path) in _LINES:
        if split not in (None, "train"):
            raise UserError(f"{name} has no split {split!r}; a file is the split 'train'.")
        return Source(_lines_of(path), _count_lines(path))
    splits = datafiles.load(name, name=config, streaming=True)
    if split is None and len(splits) > 1:
        raise UserError(f"{name} has several splits: {', '.join(splits)}. Choose one with `--dataset_split`.")
    rows = datafiles.pick_split(splits, split or next(iter(splits)), name)
    return Source(_dataset_rows(rows, name), _count_rows(rows, path))


def _lines_of(path: Path) -> Iterator[dict[str, Any] | UserError]:
    with _opened(path) as file:
        yield from _lines(file, str(path))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file that may be compressed.

    Raises:
        UserError: It cannot be read.
    """
    try:
        with fsspec.open(str(path), mode="rb", compression="infer") as file:
            yield file
    except UserError:
        raise
    except (OSError, EOFError, ValueError) as error:  # each compression has errors of its own
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}). Correct the file.") from error


def _lines(file: Iterable[bytes], what: str) -> Iterator[dict[str, Any] | UserError]:
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


def _count_lines(path: Path) -> int:
    with _opened(path) as file:
        return sum(1 for line in file if line.strip())


def _dataset_rows(rows: datasets.IterableDataset, name: str) -> Iterator[dict[str, Any]]:
    with datafiles.naming_bad_lines(name):
        yield from rows


def _count_rows(rows: datasets.IterableDataset, path: Path) -> int | None:
    if path.is_file() and path.suffix.lower() == ".parquet":
        return pq.ParquetFile(path).metadata.num_rows
    splits, split = rows.info.splits or {}, str(rows.split)
    return splits[split].num_examples if split in splits else None
