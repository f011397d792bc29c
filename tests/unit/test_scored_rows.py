"""Scored rows are read back as they were written, and what is no scored row is named."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scored_files

from trl_tpu.errors import UserError
from trl_tpu.evaluation.verdict import BestOfN, Verdict
from trl_tpu.report.verdicts import read_scored

PAIR = {"chosen": "abc", "rejected": "a", "reward_chosen": 1.0, "reward_rejected": 0.5}
MANY = {"chosen": ["ab", "c"], "rejected": ["def"], "reward_chosen": [1.0, None], "reward_rejected": [0]}
BROKEN = {"reward_chosen": None, "reward_rejected": None, "not_scored": "line 3: no JSON"}


def write(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl") -> Path:
    path = folder / f"scored{suffix}"
    if suffix.lower() == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    return scored_files.write(path, rows)


def verdict_on(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl", **how: Any) -> Verdict:
    found = read_scored(write(folder, rows, suffix), **how).verdict
    assert isinstance(found, Verdict)
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".PARQUET"])
def test_pairs_are_judged(tmp_path: Path, suffix: str) -> None:
    too_large = {"reward_chosen": 1e308, "reward_rejected": -1e308}  # for float32
    found = verdict_on(tmp_path, [PAIR, PAIR | {"reward_chosen": None}, PAIR | too_large], suffix)
    assert (found.pairs, found.left_out, found.accuracy.value) == (1, 2, 1)


def test_steps_with_labels_are_judged_and_no_other_completions_with_labels(tmp_path: Path) -> None:
    solution = {"completions": ["b", "c"], "step_rewards": [-0.5, 2.0]}
    labels: list[Any] = [[0, 1], [1], [-1, 1], [None, 1], ["good", "bad"], True, None]
    found = verdict_on(tmp_path, [solution | {"labels": each} for each in labels])
    assert (found.of, found.pairs, found.left_out, found.accuracy.value) == ("steps", 2, 6, 1)
    beside = {"completions": ["b", "c"], "labels": [0, 1]}
    assert verdict_on(tmp_path, [PAIR | beside]).of == "pairs"
    ranked = verdict_on(tmp_path, [beside | {"rewards": [2.0, 1.0], "ranks": [2, 1]}])
    assert (ranked.of, ranked.accuracy.value) == ("pairs", 0)
    with pytest.raises(UserError, match="scored.jsonl"):
        read_scored(write(tmp_path, [beside | {"rewards": [2.0, 1.0]}]))


def test_tokens_are_the_lengths_if_every_row_has_them(tmp_path: Path) -> None:
    counted = PAIR | {"tokens_chosen": 7, "tokens_rejected": 9}
    found = verdict_on(tmp_path, [counted, counted, BROKEN]).length
    assert found is not None and [each.middle for each in found.bins] == [-2]
    assert verdict_on(tmp_path, [counted, PAIR]).length is None


def test_rows_are_grouped_by_their_subset_or_any_column(tmp_path: Path) -> None:
    rows = [MANY | {"subset": "Math", "reward_chosen": [2, 1]}, MANY | {"subset": "Focus"}]
    found = read_scored(write(tmp_path, rows)).verdict
    assert isinstance(found, BestOfN) and (found.rows, found.left_out, list(found.groups)) == (1, 1, ["Math"])
    rows = [PAIR | {"source": label} for label in ("web", None, 3, "web")]
    groups = verdict_on(tmp_path, rows, eval_by="source").groups
    assert {name: each.count for name, each in groups.items()} == {"3": 1, "none": 1, "web": 2}


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("scored.jsonl", "", "scored.jsonl"),
        ("scored.jsonl", '{"reward": 1}\n{\n', "line 2,"),
        ("scored.jsonl", "[1]\n", "line 1,"),
        ("scored.jsonl", '{"reward": 1.5, "text": "a"}\n', "reward, text"),
        ("scored.jsonl", '{"reward_chosen": "high", "reward_rejected": 1}\n', "scored.jsonl: .*'high'"),
        ("scored.jsonl", '{"reward_chosen": 1, "reward_rejected": 2}\n', "'by'"),
        ("x.parquet", "reward\n1\n", "x.parquet"),
    ],
)
def test_what_is_no_scored_row_is_named(tmp_path: Path, file: str, text: str, name: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=name):
        read_scored(tmp_path / file, "by" if name == "'by'" else None)


@pytest.mark.parametrize("row", [PAIR, MANY | {"reward_chosen": [2, 1]}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_without_any_reward_is_left_out(tmp_path: Path, row: dict[str, Any], place: int) -> None:
    """A broken line has no columns but those of the scores, and null instead of a list."""
    rows = [row | {"subset": "Math"}, row | {"subset": "Focus"}]
    rows.insert(place, BROKEN)
    found = read_scored(write(tmp_path, rows)).verdict
    assert found.left_out == 1 and found.groups.keys() == {"Math", "Focus"}
    with pytest.raises(UserError, match="2 pairs"):
        read_scored(write(tmp_path, [BROKEN, BROKEN]))


def test_the_better_answer_is_the_one_that_the_label_says_is_more_probable(tmp_path: Path) -> None:
    row = {"chosen": "a", "rejected": "b", "not_scored": None}
    cases = [(0.9, 1.0, 0.0), (0.1, 0.0, 2.0), (0.5, 3.0, 0.0)]
    rows = [row | {"chosen_probability": p, "reward_chosen": c, "reward_rejected": r} for p, c, r in cases]
    verdict = verdict_on(tmp_path, rows)
    assert (verdict.pairs, verdict.accuracy.value, verdict.margins.mean) == (2, 1.0, 1.5)
    with pytest.raises(UserError, match="1 pairs"):
        verdict_on(tmp_path, rows[2:])
