"""Datasets by what a user calls them, a Hub id, a folder, a file or ``synthetic:NAME``; whole, or row by row."""

import json
import sys
from collections.abc import Iterable, Iterator
from glob import escape, has_magic
from pathlib import Path
from typing import Any

import datasets
import fsspec
from datasets.data_files import get_data_patterns, sanitize_patterns

from trl_tpu.errors import UserError, UserFileError, UserKeyError
from trl_tpu.scripts import synthetic

# suffix -> the loader of `datasets` that reads it; each may be compressed
BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
STDIN = "-"
_JSON_LINES = (".jsonl", ".ndjson")

Rows = Iterator[dict[str, Any] | UserError]
"""Rows; in the place of a line that is no JSON object, what is wrong with it."""


def load(path: str, *, split: str | None = None, streaming: bool = False, **kwargs: Any) -> Any:
    """Load a dataset as [`~datasets.load_dataset`] does; `path` may also be one local file or ``synthetic:NAME``.

    Args:
        path: A Hub id, a local folder, a local file with a suffix of `BUILDERS` (perhaps compressed; it is the split
            ``train``), or ``synthetic:NAME``.
        split: Split to return; all of them when None.
        streaming: Whether to stream.
        **kwargs: `name`, `data_dir` and `data_files` of [`~datasets.load_dataset`].

    Returns:
        A dataset, or with ``split=None`` the dictionary of all splits; iterable ones when streaming.

    Raises:
        UserError: What cannot be loaded (the first broken line of JSON Lines is named), or no such split.
    """
    if path.startswith(synthetic.PREFIX):
        splits: Any = synthetic.load_dataset(path)
        if streaming:
            splits = datasets.IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in splits.items()})
        return splits if split is None else pick_split(splits, split, path)
    local = Path(path).expanduser()
    source = str(local) if local.exists() else path
    builder = None if local.is_dir() else BUILDERS.get(_suffix(local))
    if builder is not None:
        kwargs |= {"data_files": {"train": source}}
        if ".tsv" in local.suffixes[-2:]:
            kwargs["sep"] = "\t"
    try:
        if builder is not None or local.is_dir() or path in BUILDERS.values():
            kwargs["data_files"] = _files(local if local.is_dir() else Path(), **kwargs)
        return datasets.load_dataset(builder or source, split=split, streaming=streaming, **kwargs)
    except Exception as error:  # each format's library has errors of its own, and none names the file
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        kind = UserFileError if isinstance(cause, OSError) else UserError
        raise broken_line([path]) or kind(
            f"{path} cannot be loaded as a dataset: {' '.join(str(cause).split()) or type(cause).__name__} Correct "
            f"the name, or the file: it must be what its suffix says ({', '.join(BUILDERS)}, compressed or not), and "
            "its rows must all have the same columns."
        ) from error


def open_rows(name: str, config: str | None = None, split: str | None = None) -> tuple[Rows, int | None]:
    """Find the rows that a user names, and how many there are, if that is known; they are read one by one.

    Args:
        name: ``-`` for JSON Lines from the standard input, else as for `load`.
        config: The configuration of a dataset.
        split: The split of a dataset; may be left out where there is only one.

    Raises:
        UserError: There are none of that name, or several splits and none is chosen.
    """
    if name == STDIN:
        return _read_json(sys.stdin.buffer, "the standard input"), None
    path = Path(name).expanduser()
    if _holds_json_lines(path) and split in (None, "train"):
        return _read_json(_lines(path), name), sum(1 for line in _lines(path) if line.strip())
    splits = load(name, name=config, streaming=True)
    if split is None and len(splits) > 1:
        raise UserError(f"{name} has several splits: {', '.join(splits)}. Choose one with `--dataset_split`.")
    rows = pick_split(splits, split or next(iter(splits)), name)
    known = (rows.info.splits or {}).get(str(rows.split))
    return iter(rows), known.num_examples if known else None


def broken_line(names: Iterable[str]) -> UserError | None:
    """Return what is wrong with the first broken line of JSON Lines in these files and folders; None if none is."""
    paths = [Path(name).expanduser() for name in names]
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    rows = (row for file in files if _holds_json_lines(file) for row in _read_json(_lines(file), str(file)))
    return next((row for row in rows if isinstance(row, UserError)), None)


def pick_split(splits: dict[str, Any], split: str, what: str) -> Any:
    """Return ``splits[split]``, or raise an error that names the splits there are.

    Args:
        splits: The splits of a dataset.
        split: Name of one of them.
        what: How the error calls the dataset.

    Raises:
        UserKeyError: There is no such split.
    """
    if split not in splits:
        raise UserKeyError(f"{what} has no split {split!r}; its splits are: {', '.join(map(repr, splits))}.")
    return splits[split]


def _files(folder: Path, data_dir: str | None = None, data_files: Any = None, **_: Any) -> Any:
    """Return patterns in which names of what is there mean that: `datasets` takes ``pairs[1].csv`` for a pattern."""
    base = str((folder / (data_dir or "")).resolve())
    if data_files is None and has_magic(base):
        data_files = get_data_patterns(escape(base))

    def pattern(name: str) -> str:
        path = Path(base, name)
        return escape(str(path)) if path.is_file() else name if "://" in name else str(Path(escape(base), name))

    return data_files and {split: list(map(pattern, each)) for split, each in sanitize_patterns(data_files).items()}


def _suffix(path: Path) -> str:
    """Return the suffix that says what is in a file, which may be compressed."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()


def _holds_json_lines(path: Path) -> bool:
    return path.is_file() and _suffix(path) in _JSON_LINES


def _lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a file that may be compressed.

    Raises:
        UserError: It cannot be read.
    """
    try:
        with fsspec.open(str(path), mode="rb", compression="infer") as file:
            yield from file
    except (OSError, EOFError, ValueError) as error:  # each compression has errors of its own, and none names the file
        raise UserError(f"{path} cannot be read ({error}). Correct the file.") from error


def _read_json(lines: Iterable[bytes], what: str) -> Rows:
    """Read JSON Lines; rows may have different keys, which a dataset of one schema does not allow."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:  # of JSON, and of UTF-8
            yield UserError(f"{what} is broken: line {number}: {error}. Correct the line.")
            continue
        is_row = isinstance(row, dict)
        yield row if is_row else UserError(f"{what} is broken: line {number}: a row must be a JSON object.")
