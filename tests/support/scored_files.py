"""Files of rows for `trl-tpu score`, its command line, and what it wrote."""

import json
from pathlib import Path
from typing import Any

import pytest


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def words(model: Path, dataset: Path | str, output: Path | None = None) -> list[str]:
    more = [] if output is None else ["--output", str(output)]
    return ["score", "--model_name_or_path", str(model), "--dataset_name", str(dataset), *more]
