"""Write the pairs of nvidia/HelpSteer3 that people preferred one answer of, as train.jsonl and test.jsonl in a folder.

python examples/recipes/helpsteer3.py data/helpsteer3
"""

import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset


def pair_of(row: dict[str, Any]) -> dict[str, Any]:
    """Make a pair of a row, whose preference is negative where the first answer is the better one."""
    better, worse = sorted(("response1", "response2"), reverse=row["overall_preference"] > 0)
    answers = {
        name: [{"role": "assistant", "content": row[key]}]
        for name, key in zip(("chosen", "rejected"), (better, worse), strict=True)
    }
    return {"prompt": row["context"], **answers}


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train"), ("validation", "test")):
        rows = load_dataset("nvidia/HelpSteer3", "preference", split=split)
        rows = rows.filter(lambda row: row["overall_preference"] != 0)
        rows.map(pair_of, remove_columns=rows.column_names).to_json(f"{folder}/{name}.jsonl")


if __name__ == "__main__":
    main(sys.argv[1])
