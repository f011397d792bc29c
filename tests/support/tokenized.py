"""Rows of token ids in the columns of prepared datasets."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset
from preference_forms import tiny_tokenizer

from trl_tpu.data.length_stats import NO_LABEL
from trl_tpu.data.tokenize import prepare_preference_dataset

COLUMNS = ("chosen_ids", "rejected_ids")


def in_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Write a row that has `answers` in the columns that its form of data has; any others stay."""
    others = {name: value for name, value in row.items() if name not in ("answers", "step_ends")}
    if "step_ends" in row:
        (ids,), grades = row["answers"], dict(zip(row["step_ends"], others.pop("grades"), strict=True))
        return others | {"input_ids": ids, "labels": [grades.get(at, NO_LABEL) for at in range(len(ids))]}
    if "grades" in row:
        return others | {"answer_ids": row["answers"]}
    return others | dict(zip(COLUMNS, row["answers"], strict=True))


def dataset_of(pairs: Iterable[Any], **more: list[Any]) -> Dataset:
    """Make a prepared dataset of pairs of lists of token ids, with ``more`` columns."""
    return Dataset.from_dict({**dict(zip(COLUMNS, zip(*pairs, strict=True), strict=True)), **more})


def prepare(data: Any, tokenizer: Any = None, streaming: bool = False, **settings: Any) -> Any:
    """Prepare a dataset, or a list of rows, for training."""
    if isinstance(data, list):
        data = IterableDataset.from_generator(partial(iter, data)) if streaming else Dataset.from_list(data)
    defaults: dict[str, Any] = {"num_embeddings": 100_000, "max_length": None, "num_proc": None, "name": "train"}
    return prepare_preference_dataset(data, tokenizer or tiny_tokenizer(), **defaults | settings)
