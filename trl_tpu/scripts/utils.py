"""Dataset arguments of the scripts, and functions that load the datasets."""

import logging
import math
import sys
from dataclasses import dataclass, field, replace
from glob import escape, has_magic
from pathlib import Path
from typing import Any

import datasets
from datasets import DatasetDict, IterableDatasetDict
from datasets.data_files import get_data_patterns, sanitize_patterns

from trl_tpu.config.reward_config import dataclass_with_help
from trl_tpu.errors import UserError, UserKeyError, explaining
from trl_tpu.report.verdicts import Rows, lines_of, read_json
from trl_tpu.scripts import synthetic
from trl_tpu.scripts.parser import TrlParser as TrlParser  # at TRL's path

logger = logging.getLogger(__name__)

SPLIT_SEED = 42  # fixed, since TRL's new test split on every run mixes training and test rows on a resume

# suffix -> the builder of `datasets` that reads it; files may be compressed
BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")


@dataclass
class DatasetConfig:
    """One dataset of a mixture; the fields are the arguments of [`~datasets.load_dataset`].

    Args:
        path: A Hub id, a local folder, a local file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``), or
            ``synthetic:NAME``.
        name: Configuration of the dataset.
        data_dir: Folder inside the dataset.
        data_files: Files of the dataset.
        split: Split to load; slices such as ``train[:50%]`` work.
        columns: Columns to keep; all when None.
        fraction: Share of this dataset in the mixture; set it for all datasets or for none. Shares are normalized to
            sum to one. The mixture is as large as possible without repeating a row: the first `round(share * size)`
            rows of each dataset are kept.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass_with_help
class DatasetMixtureConfig:
    """Several datasets, concatenated: the ``datasets:`` section of a YAML file.

    Args:
        datasets: Datasets of the mixture, in the YAML file of `--config`; mappings become [`DatasetConfig`].
        streaming: Whether to stream the datasets of the mixture.
        test_split_size: Rows of the mixture, or of the training split of `dataset_name`, to hold out as the split to
            evaluate on: a count, or a share below 1. By default no rows are held out.
    """

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**item) if isinstance(item, dict) else item for item in self.datasets]


@dataclass_with_help
class ScriptArguments:
    """The dataset of a script. The ``datasets:`` of a mixture override all fields except `ignore_bias_buffers`.

    Args:
        dataset_name: A Hub id, a local folder, a local file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``), or
            ``synthetic:NAME``.
        dataset_config: Configuration of the dataset.
        dataset_train_split: Split to train on.
        dataset_test_split: Split to evaluate on.
        dataset_streaming: Whether to stream the dataset.
        ignore_bias_buffers: Kept for scripts that set it to work around a bug of DistributedDataParallel.
    """

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


RewardScriptArguments = ScriptArguments  # its name in TRL 0.11


def init_zero_verbose() -> None:
    """Log errors only, and send warnings to the log."""
    logging.basicConfig(format="%(message)s", datefmt="[%X]", level=logging.ERROR)
    logging.captureWarnings(True)


def load_named_dataset(script_args: ScriptArguments) -> DatasetDict | IterableDatasetDict:
    """Load every split of the dataset that `script_args` names.

    Raises:
        UserError: `dataset_name` is None, or `load` fails.
    """
    if (name := script_args.dataset_name) is None:
        raise UserError("Either `datasets` (in the YAML file of `--config`) or `dataset_name` must be provided.")
    return load(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)


def load_splits(script_args: ScriptArguments, mixture: DatasetMixtureConfig) -> tuple[Any, str]:
    """Load the splits of the mixture, or else of the named dataset; also return a name of the data for errors.

    Raises:
        UserError: The arguments contain neither a mixture nor a dataset name, or `load` fails.
    """
    name = script_args.dataset_name
    if not mixture.datasets and name and mixture.test_split_size is not None:
        train, test = script_args.dataset_train_split, script_args.dataset_test_split
        part = DatasetConfig(name, script_args.dataset_config, split=train)
        splits = get_dataset(replace(mixture, datasets=[part], streaming=script_args.dataset_streaming))
        return {train: splits["train"], test: splits["test"]}, name
    if not mixture.datasets:
        return load_named_dataset(script_args), str(name)
    if name:
        logger.warning(f"Both are given: the mixture `datasets` is used, and `dataset_name={name}` is not.")
    return get_dataset(mixture), "the mixture"


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Load the datasets of a mixture and concatenate them, in order.

    Args:
        mixture_config: The mixture.

    Returns:
        The split ``train``, and ``test`` too with a `test_split_size`; iterable datasets when streaming.

    Raises:
        UserError: No dataset is named, a fraction is not positive, fractions or a test split are set while streaming,
            or a split does not exist.
    """
    named, streaming = mixture_config.datasets, mixture_config.streaming
    fractions: list[Any] = [part.fraction for part in named]
    test_size = mixture_config.test_split_size
    if streaming and (test_size is not None or any(fractions)):
        raise UserError(
            "`test_split_size` and a dataset's `fraction` are not supported with streaming datasets, whose length is "
            "unknown. Leave them out, or load the datasets whole."
        )
    parts = []
    for part in named:
        arguments = {name: value for name, value in vars(part).items() if name not in ("columns", "fraction")}
        dataset = load(**arguments, streaming=streaming)
        parts.append(dataset if part.columns is None else dataset.select_columns(part.columns))
    if fractions != [None] * len(parts):
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in fractions):
            raise UserError(
                "`fraction` must be set for either all datasets in the mixture or none of them, each above 0, not "
                f"{fractions}. Correct it."
            )
        shares = [fraction / sum(fractions) for fraction in fractions]
        size = min(len(rows) / share for rows, share in zip(parts, shares, strict=True))
        parts = [rows.select(range(round(share * size))) for rows, share in zip(parts, shares, strict=True)]
    if not parts:
        raise UserError("No datasets were loaded: `datasets` is empty. Name one or more.")
    mixture = datasets.concatenate_datasets(parts)
    if test_size is None:
        return (IterableDatasetDict if streaming else DatasetDict)({"train": mixture})
    # command-line values are floats: 200.0 means 200 rows
    rows = int(test_size) if test_size >= 1 and float(test_size).is_integer() else test_size
    return mixture.train_test_split(test_size=rows, seed=SPLIT_SEED)


# ---- one dataset


def load(path: str, *, split: str | None = None, streaming: bool = False, **kwargs: Any) -> Any:
    """Load a dataset like [`~datasets.load_dataset`]; `path` may also be a local file or ``synthetic:NAME``.

    Args:
        path: A Hub id, a local folder, a local file with a suffix of `BUILDERS` (compressed or not; its split is
            ``train``), or ``synthetic:NAME``.
        split: Split to return; None returns all splits.
        streaming: Whether to stream.
        **kwargs: `name`, `data_dir` and `data_files` of [`~datasets.load_dataset`].

    Returns:
        A dataset, or with ``split=None`` a dictionary of all splits; iterable datasets when streaming.

    Raises:
        UserError: The dataset cannot be loaded, or the split does not exist.
    """
    if path.startswith(synthetic.PREFIX):
        splits: Any = synthetic.load_dataset(path)
        if streaming:
            splits = IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in splits.items()})
        return splits if split is None else pick_split(splits, split, path)
    local = Path(path).expanduser()
    source = str(local) if local.exists() else path
    builder = None if local.is_dir() else BUILDERS.get(_suffix(local))
    if builder is not None:
        kwargs |= {"data_files": {"train": source}}
        if ".tsv" in local.suffixes[-2:]:
            kwargs["sep"] = "\t"
    if local.is_file() and not local.stat().st_size:
        raise UserError(f"{path} is empty: it has no rows.")
    with explaining(f"{path} cannot be loaded as a dataset", f"Correct it; files end in {', '.join(BUILDERS)}."):
        if builder is not None or local.is_dir() or path in BUILDERS.values():
            kwargs["data_files"] = _files(local if local.is_dir() else Path(), **kwargs)
        return datasets.load_dataset(builder or source, split=split, streaming=streaming, **kwargs)


def _files(folder: Path, data_dir: str | None = None, data_files: Any = None, **_: Any) -> Any:
    """Return glob patterns with the names of existing files escaped: ``pairs[1].csv`` is a valid file name."""
    base = str((folder / (data_dir or "")).resolve())
    if data_files is None and has_magic(base):
        data_files = get_data_patterns(escape(base))

    def pattern(name: str) -> str:
        path = Path(base, name)
        return escape(str(path)) if path.is_file() else name if "://" in name else str(Path(escape(base), name))

    return data_files and {split: list(map(pattern, names)) for split, names in sanitize_patterns(data_files).items()}


def pick_split(splits: dict[str, Any], split: str, what: str, fix: str = "") -> Any:
    """Return ``splits[split]``, or raise an error that lists the existing splits.

    Args:
        splits: The splits of a dataset.
        split: Name of the split to return.
        what: Name of the dataset in the error.
        fix: Advice at the end of the error.

    Raises:
        UserKeyError: The split does not exist.
    """
    if split not in splits:
        raise UserKeyError(f"{what} has no split {split!r}; its splits are: {', '.join(map(repr, splits))}.{fix}")
    return splits[split]


def open_rows(name: str, config: str | None = None, split: str | None = None) -> tuple[Rows, int | None]:
    """Open a dataset to read it row by row; a broken line of JSON Lines gives an error in place of a row.

    Args:
        name: As `path` of `load`, or ``-`` for JSON Lines from the standard input.
        config: Configuration of a dataset on the Hub.
        split: The split to read; optional if the dataset has only one.

    Returns:
        The rows, and their number if it is known.

    Raises:
        UserError: The dataset does not exist, or it has several splits and none is chosen.
    """
    if name == "-":
        return read_json(sys.stdin.buffer, "the standard input"), None
    path = Path(name).expanduser()
    if path.is_file() and _suffix(path) in (".jsonl", ".ndjson") and split in (None, "train"):
        return read_json(lines_of(path), name), sum(1 for line in lines_of(path) if line.strip())
    splits = load(name, name=config, streaming=True)
    if split is None and len(splits) > 1:
        raise UserError(f"{name} has several splits: {', '.join(splits)}. Choose one with `--dataset_split`.")
    rows = pick_split(splits, split or next(iter(splits)), name)
    info = (rows.info.splits or {}).get(str(rows.split))
    return iter(rows), info.num_examples if info else None


def _suffix(path: Path) -> str:
    """Return the suffix of a file's format, without a suffix of compression."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()
