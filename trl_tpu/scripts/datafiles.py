"""One function that loads a dataset by what a user calls it: a Hub id, a folder, a file, or ``synthetic:NAME``."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa

from trl_tpu.errors import UserError, UserFileError
from trl_tpu.scripts import synthetic

# suffix -> the loader of `datasets` that reads it; each may be compressed
BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")


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
        UserError: What cannot be loaded (the first bad line of a JSON file is named), or a split that is not there.
        UserFileError: `path` spells a local file and there is none.
    """
    if path.startswith(synthetic.PREFIX):
        return _synthetic(path, split, streaming)
    local = Path(path).expanduser()
    source = str(local) if local.exists() else path
    if (builder := _builder(local)) is not None:
        if not local.exists():
            raise UserFileError(f"There is no data file {path} (looked for {local.absolute()}).")
        kwargs |= {"data_files": {"train": source}}
        if ".tsv" in local.suffixes[-2:]:
            kwargs["sep"] = "\t"
        source = builder
    try:
        return datasets.load_dataset(source, split=split, streaming=streaming, **kwargs)
    except Exception as error:  # each format's library has errors of its own, and none names the file
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
        raise UserError(
            _bad_line(local)
            or f"{path} cannot be loaded as a dataset: {reason}. Correct the name, or the file: it must be what its "
            f"suffix says ({', '.join(BUILDERS)}, compressed or not), and its rows must all have the same columns."
        ) from error


@contextmanager
def naming_bad_lines(*paths: str | None) -> Iterator[None]:
    """Raise UserError, with file and line, where a JSON file is broken that is streamed meanwhile."""
    try:
        yield
    except (pa.ArrowException, datasets.exceptions.DatasetGenerationError, UnicodeDecodeError, EOFError) as error:
        named = [path for path in paths if path]
        fault = next(filter(None, (_bad_line(Path(path).expanduser()) for path in named)), None)
        if fault is None and isinstance(error, pa.ArrowException) and named:
            fault = f"{', '.join(named)} cannot be read: {error}. Correct the file."
        if fault is None:  # another's error
            raise
        raise UserError(fault) from error


def _bad_line(path: Path) -> str | None:
    """Say which JSON Lines file, of one file or of a folder, is broken, in which line and how; None if none is."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file() or _builder(file) != "json":
            continue
        number = 0
        try:
            with fsspec.open(str(file), mode="rb", compression="infer") as lines:
                for number, line in enumerate(lines, start=1):
                    text = line.decode("utf-8-sig")
                    if number == 1 and text.startswith("["):  # an array of rows
                        text += lines.read().decode()
                    if text.strip():
                        json.loads(text)
        except json.JSONDecodeError as error:
            line = number + error.lineno - 1
            return f"{file} is broken: line {line}: {error.msg} (column {error.colno}). Correct the file."
        except Exception as error:  # each compression has errors of its own
            return f"{file} is broken: line {number}: {' '.join(str(error).split())}. Correct the file."
    return None


def pick_split(splits: dict[str, Any], split: str, what: str) -> Any:
    """Return ``splits[split]``, or raise an error that names the splits there are.

    Args:
        splits: The splits of a dataset.
        split: Name of one of them.
        what: How the error calls the dataset.

    Raises:
        UserError: There is no such split.
    """
    if split not in splits:
        raise UserError(f"{what} has no split {split!r}; its splits are: {', '.join(map(repr, splits))}.")
    return splits[split]


def suffix_of(path: Path) -> str:
    """Return the suffix that says what is in a file, which may be compressed."""
    named = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return named.suffix.lower()


def _builder(path: Path) -> str | None:
    return None if path.is_dir() else BUILDERS.get(suffix_of(path))


def _synthetic(path: str, split: str | None, streaming: bool) -> Any:
    splits = synthetic.load_dataset(path)
    if streaming:
        splits = datasets.IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in splits.items()})
    return splits if split is None else pick_split(splits, split, path)
