"""One function that loads a dataset by what a user calls it: a Hub id, a folder, a file, or ``synthetic:NAME``."""

import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa

SYNTHETIC = "synthetic:"

# suffix -> the loader of `datasets` that reads it; each may be compressed
BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")


def load(path: str, *, split: str | None = None, streaming: bool = False, **kwargs: Any) -> Any:
    """[`~datasets.load_dataset`], which also takes one local file or ``synthetic:NAME`` as `path`.

    Args:
        path: A Hub id, a local folder, a local file with a suffix of `BUILDERS` (perhaps compressed; it is the split
            ``train``), or ``synthetic:NAME``.
        split: Split to return; all of them when None.
        streaming: Whether to stream.
        **kwargs: `name`, `data_dir` and `data_files` of [`~datasets.load_dataset`].

    Returns:
        A dataset, or with ``split=None`` the dictionary of all splits; iterable ones when streaming.

    Raises:
        ValueError: What cannot be loaded (the first bad line of a JSON file is named), a split that is not there,
            or `data_files` for what is a file already.
        FileNotFoundError: `path` spells a local file and there is none.
    """
    if path.startswith(SYNTHETIC):
        return _synthetic(path, split, streaming)
    local = Path(path).expanduser()
    builder = _builder(local)
    if builder is not None and not local.exists():
        raise FileNotFoundError(f"There is no data file {path} (looked for {local.absolute()}).")
    if builder is None and local.is_file():
        raise ValueError(
            f"{path} is a file, but its suffix names no format. Use one of {', '.join(BUILDERS)}, compressed or not "
            f"({', '.join(COMPRESSIONS)})."
        )
    source = str(local) if local.exists() else path
    if local.is_file():
        if kwargs.get("data_files") or kwargs.get("data_dir"):
            raise ValueError(f"{path} is a file already: leave `data_files` and `data_dir` out, or give a folder.")
        kwargs |= {"data_files": {"train": source}}
        if ".tsv" in local.suffixes[-2:]:
            kwargs["sep"] = "\t"
        source = str(builder)
    try:
        return datasets.load_dataset(source, split=split, streaming=streaming, **kwargs)
    except Exception as error:  # each format's library has errors of its own, and none names the file
        raise broken(path, error) from error


@contextmanager
def naming_broken_files(*paths: str | None) -> Iterator[None]:
    """While streams of these datasets are read: raise ValueError, with the file and line, where a file is broken."""
    try:
        yield
    except (pa.ArrowException, datasets.exceptions.DatasetGenerationError, UnicodeDecodeError, EOFError) as error:
        for path in paths:
            if path and (fault := first_fault(Path(path).expanduser())) is not None:
                raise ValueError(fault) from error
        raise


def broken(path: str, error: Exception) -> ValueError:
    """The error to raise where `path` cannot be loaded, which names the file and line where that is the cause."""
    local = Path(path).expanduser()
    if not local.exists():
        return ValueError(
            f"There is no file or folder {path}, and as a dataset of the Hub it cannot be loaded: {_cause(error)}. "
            "Correct the name, or look to the network and to the rights to a private dataset."
        )
    if (fault := first_fault(local)) is not None:
        return ValueError(fault)
    if local.is_dir() and not any(_builder(file) for file in local.rglob("*")):
        return ValueError(f"The folder {path} holds no data files: put in files such as train{', '.join(BUILDERS)}.")
    return ValueError(
        f"{path} cannot be loaded as a dataset: {_cause(error)}. Check that it is what its suffix says, and that all "
        "its rows have the same columns with values of the same types."
    )


def first_fault(path: Path) -> str | None:
    """Which JSON file is broken, where and how, of one file or of a folder; None if none is."""
    for file in _json_files(path):
        try:
            with fsspec.open(str(file), mode="rb", compression="infer") as lines:
                if not any(line.strip() for line in lines):
                    return f"{file} holds no rows. Put pairs into it, a JSON object a line, or remove it."
            fault = first_bad_line(file)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            return f"{file} cannot be read: {' '.join(str(error).split())}. Write or copy it anew."
        if fault is not None:
            return f"{file} is broken: {fault}."
    return None


def _cause(error: BaseException) -> str:
    """The first cause's message in one line: `datasets` wraps it in errors that say nothing."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def pick_split(splits: dict[str, Any], split: str, what: str) -> Any:
    """``splits[split]``, with an error that names the splits there are.

    Args:
        splits: The splits of a dataset.
        split: Name of one of them.
        what: How the error calls the dataset.

    Raises:
        ValueError: There is no such split.
    """
    if split not in splits:
        raise ValueError(f"{what} has no split {split!r}; its splits are: {', '.join(map(repr, splits))}.")
    return splits[split]


def first_bad_line(file: Path) -> str | None:
    """Where and how a JSON or JSON Lines file is broken, or None if it is not.

    Args:
        file: The file, perhaps compressed. One whose first character is ``[`` is one JSON array.

    Returns:
        ``"line 3: Expecting ',' delimiter (column 14)"``, say.
    """
    with fsspec.open(str(file), mode="rb", compression="infer") as lines:
        if lines.read(64).lstrip().startswith(b"["):
            lines.seek(0)
            return _fault(lines.read())
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip() and (fault := _fault(line, number)) is not None:
                return fault
    return None


def _fault(text: bytes, number: int | None = None) -> str | None:
    """What is wrong with a line, or with a whole file where `number` is None."""
    first = number in (None, 1)
    try:
        value = json.loads(text.decode("utf-8-sig" if first else "utf-8"), object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return f"line {number or error.lineno}: {error.msg} (column {error.colno}); correct or remove that line"
    except UnicodeDecodeError as error:
        line = number or text.count(b"\n", 0, error.start) + 1
        column = error.start - text.rfind(b"\n", 0, error.start)
        byte = f"byte {column} of the line is 0x{text[error.start]:02x}"
        return f"line {line}: not UTF-8 ({byte}, {error.reason}); save the file as UTF-8"
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!a}"
        return f"line {number or 1}: {half} is half of a surrogate pair and no character; correct or remove that line"
    except (ValueError, RecursionError) as error:
        return f"line {number or 1}: {error}; correct or remove that line"
    if number is not None and not isinstance(value, dict | None):
        return f"line {number}: a row must be a JSON object with a name for each column, not {type(value).__name__}"
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there twice in one object")
    return row


def _builder(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1]) if suffixes and not path.is_dir() else None


def _json_files(path: Path) -> list[Path]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and _builder(file) == "json"]


def _synthetic(path: str, split: str | None, streaming: bool) -> Any:
    from trl_tpu.scripts import synthetic

    splits = synthetic.load_dataset(path)
    if streaming:
        splits = datasets.IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in splits.items()})
    return splits if split is None else pick_split(splits, split, path)
