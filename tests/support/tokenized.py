"""Rows of token ids in the columns of prepared datasets."""

from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Dataset

from trl_tpu.data.measure import NO_LABEL

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
