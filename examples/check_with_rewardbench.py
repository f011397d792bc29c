"""Compare the RewardBench 2 scores of ``trl-tpu report`` and of the rewardbench package, on the same rewards.

    trl-tpu score --model_name_or_path MODEL --dataset_name ROWS.jsonl --output SCORED.jsonl
    trl-tpu report SCORED.jsonl --output REPORT
    python examples/check_with_rewardbench.py SCORED.jsonl REPORT/verdict.json    # where rewardbench is installed

ROWS.jsonl has RewardBench 2's columns: `prompt`, `chosen` and `rejected` (lists), `subset`, and in the subset Ties the
`id` (`ref:N`, `tied:N`). rewardbench pins an older transformers, so it needs a separate environment. Only its
arithmetic is called: no model, no Hub.

If all right answers of a question in Ties have exactly the same reward, rewardbench 0.1.4 leaves the question out of
the last term of its score. rewardbench 0.1.5 and ``trl-tpu report`` count it.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from rewardbench import process_single_model, reroll_and_score_dataset

TIES = "ties"
TOLERANCE = 1e-6


def rolled_up(rows: list[dict[str, Any]]) -> Dataset:
    """Return the rows of rewardbench's `scripts/run_v2.py` after scoring: one row per prompt, with `results`."""
    flat = [
        # a reward is a list of one, as a model with one label gives it
        {"subset": row["subset"], "id": str(row.get("id", "")), "text": "", "scores": [float(reward)]}
        for row in rows
        for reward in row["reward_chosen"] + row["reward_rejected"]
    ]
    answers = [len(row["reward_chosen"]) + len(row["reward_rejected"]) for row in rows]
    rolled = reroll_and_score_dataset(Dataset.from_list(flat), answers, cols_to_combine=["text", "scores"])
    return rolled.add_column("num_correct", [len(row["reward_chosen"]) for row in rows])


def scores_of(rolled: Dataset) -> dict[str, float]:
    """Return each subset's score, as `scripts/run_v2.py` computes it."""
    scores = {}
    for subset in sorted(set(rolled["subset"])):
        part = rolled.filter(lambda row, subset=subset: row["subset"] == subset)
        is_ties = subset.lower() == TIES
        scores[subset] = float(process_single_model(part)[1]) if is_ties else sum(part["results"]) / len(part)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scored", type=Path)
    parser.add_argument("verdict", type=Path)
    arguments = parser.parse_args()
    disable_progress_bars()
    rows = [json.loads(line) for line in arguments.scored.read_text(encoding="utf-8").splitlines()]
    theirs = scores_of(rolled_up(rows))
    verdict = json.loads(arguments.verdict.read_text(encoding="utf-8"))
    ours = {subset: each["value"] for subset, each in verdict["groups"].items()}
    theirs["mean"], ours["mean"] = sum(theirs.values()) / len(theirs), verdict["mean_over_groups"]
    print(f"{'':<16} {'rewardbench ' + version('rewardbench'):>18} {'trl-tpu report':>18}")
    for subset, score in theirs.items():
        print(f"{subset:<16} {score:>18.12f} {ours[subset]:>18.12f}")
    largest = max(abs(score - ours[subset]) for subset, score in theirs.items())
    print(f"The largest difference is {largest:.1e}")
    if largest > TOLERANCE:
        raise SystemExit(f"more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
