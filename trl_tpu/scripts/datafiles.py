"""One function that loads a dataset by what a user calls it: a Hub id, a folder, a file, or ``synthetic:NAME``."""

import json
from pathlib import Path
from typing import Any

import datasets
import fsspec

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
        ValueError: A JSON file that cannot be read (its first bad line is named), a split that is not there, or
            `data_files` for what is a file already.
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
    except datasets.exceptions.DatasetGenerationError as error:
        for file in _json_files(local):
            if (fault := first_bad_line(file)) is not None:
                raise ValueError(f"{file} is broken: {fault}. Correct or remove that line.") from error
        raise


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
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {number or error.lineno}: {error.msg} (column {error.colno})"
    except UnicodeDecodeError as error:
        return f"line {number or text[: error.start].count(10) + 1}: not UTF-8 ({error.reason})"
    if number is not None and not isinstance(value, dict):
        return f"line {number}: a row must be a JSON object with a name for each column, not {type(value).__name__}"
    return None


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
