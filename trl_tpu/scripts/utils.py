"""What the scripts share: the arguments that name their data, and the functions that load it."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import datasets
from datasets import DatasetDict, IterableDatasetDict

from trl_tpu.config.reward_config import help_from_docstring
from trl_tpu.errors import UserError
from trl_tpu.scripts.datafiles import load
from trl_tpu.scripts.parser import TrlParser as TrlParser  # at TRL's path

SPLIT_SEED = 42  # TRL draws a new test split on every run, which mixes training and test rows on a resume


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
        fraction: Share of the mixture, for all of its datasets or none. Shares are normalized to sum to one, and the
            mixture is as large as it can be without repeating a row: the first `round(share * size)` rows of each
            dataset are kept.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@help_from_docstring
@dataclass
class DatasetMixtureConfig:
    """Several datasets, concatenated: the ``datasets:`` section of a YAML file.

    Args:
        datasets: Datasets of the mixture, in the YAML file of `--config`; mappings become [`DatasetConfig`].
        streaming: Whether to stream the datasets of the mixture.
        test_split_size: How many rows of the mixture to hold out as the split `test`: a count, or a share below 1.
            None without a value.

    Raises:
        UserError: `datasets` is no list, or one of it has no `path` or an unknown key.
    """

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        try:
            self.datasets = [DatasetConfig(**item) if isinstance(item, dict) else item for item in self.datasets]
        except TypeError as error:  # no list, an unknown key, or no path
            raise UserError(f"`datasets` must be a list of mappings with a `path` each: {error}.") from error


@help_from_docstring
@dataclass
class ScriptArguments:
    """Where a script's data is. All but `ignore_bias_buffers` is overruled by the ``datasets:`` of a mixture.

    Args:
        dataset_name: A Hub id, a local folder, a local file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``), or
            ``synthetic:NAME``.
        dataset_config: Configuration of the dataset.
        dataset_train_split: Split to train on.
        dataset_test_split: Split to evaluate on.
        dataset_streaming: Whether to stream the dataset.
        ignore_bias_buffers: Kept for scripts that set it; it works around a fault of DistributedDataParallel.
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
        UserError: No `dataset_name`, or what `load` refuses.
    """
    if script_args.dataset_name is None:
        raise UserError("Either `datasets` (in the YAML file of `--config`) or `dataset_name` must be provided.")
    return load(script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Load the datasets of a mixture and concatenate them, in order.

    Args:
        mixture_config: The mixture.

    Returns:
        The split ``train``, and ``test`` too with a `test_split_size`; iterable datasets when streaming.

    Raises:
        UserError: No datasets; fractions for some only; fractions or a test split while streaming; a split that is
            not there.
    """
    if not mixture_config.datasets:
        raise UserError("No datasets were loaded from the mixture configuration: its list `datasets` is empty.")
    test_size = mixture_config.test_split_size
    if mixture_config.streaming and (test_size or any(part.fraction for part in mixture_config.datasets)):
        raise UserError(
            "`test_split_size` and a dataset's `fraction` are not supported with streaming datasets, whose length is "
            "unknown. Leave them out, or load the datasets whole."
        )
    parts = []
    for part in mixture_config.datasets:
        dataset = load(
            part.path,
            name=part.name,
            data_dir=part.data_dir,
            data_files=part.data_files,
            split=part.split,
            streaming=mixture_config.streaming,
        )
        parts.append(dataset if part.columns is None else dataset.select_columns(part.columns))
    parts = _take_fractions(parts, mixture_config)
    mixture = datasets.concatenate_datasets(parts)
    if mixture_config.streaming:
        return IterableDatasetDict({"train": mixture})
    if test_size is None:
        return DatasetDict({"train": mixture})
    # a command line can only give a float: 200.0 means 200 rows
    rows = int(test_size) if test_size >= 1 and float(test_size).is_integer() else test_size
    return mixture.train_test_split(test_size=rows, seed=SPLIT_SEED)


def _take_fractions(parts: list[Any], mixture_config: DatasetMixtureConfig) -> list[Any]:
    """Take the first rows of each part: the shares that are asked for, of the largest mixture without repeats."""
    fractions: list[Any] = [part.fraction for part in mixture_config.datasets]
    if not any(fraction is not None for fraction in fractions):
        return parts
    for part, fraction in zip(mixture_config.datasets, fractions, strict=True):
        if not isinstance(fraction, int | float) or not 0 < fraction < math.inf:
            raise UserError(
                "`fraction` must be set for either all datasets in the mixture or none of them, each above 0; for "
                f"{part.path} it is {fraction!r}. Correct it, or remove the dataset from the mixture."
            )
    shares = [fraction / sum(fractions) for fraction in fractions]
    size = min(len(part) / share for part, share in zip(parts, shares, strict=True))
    return [part.select(range(round(share * size))) for part, share in zip(parts, shares, strict=True)]
