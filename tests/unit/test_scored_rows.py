"""Scored rows are read back as they were written, and what is no scored row is named."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trl_tpu.errors import UserError
from trl_tpu.report.scored_rows import ANSWERS, PAIRS, REWARDS, read_scored

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}]
PAIR = {"chosen": "abc", "rejected": "a", "reward_chosen": 1.0, "reward_rejected": 0.5}
MANY = {"chosen": ["ab", "c"], "rejected": ["def"], "reward_chosen": [1.0, None], "reward_rejected": [0]}


def write(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl") -> Path:
    path = folder / f"scored{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_pairs_are_judged_with_the_characters_of_their_texts(tmp_path: Path, suffix: str) -> None:
    more = PAIR | {"reward_chosen": None, "chosen": "abcd"}
    found = read_scored(write(tmp_path, [PAIR, more], suffix))
    assert (found.kind, found.unit, found.lengths) == (PAIRS, "characters", [([3], [1]), ([4], [1])])
    assert found.verdict is not None and (found.verdict.pairs, found.verdict.left_out) == (1, 1)
    assert found.verdict.length is not None and found.verdict.length.longer_wins == 1
    rewards_M, lengths_M, chosen_M = found.finite
    assert rewards_M.tolist() == [1.0, 0.5, 0.5] and chosen_M.tolist() == [True, False, False]
    assert lengths_M is not None and lengths_M.tolist() == [3, 1, 1]


def test_tokens_are_the_lengths_if_every_row_has_them(tmp_path: Path) -> None:
    counted = PAIR | {"tokens_chosen": 7, "tokens_rejected": 9}
    found = read_scored(write(tmp_path, [counted, counted]))
    assert (found.unit, found.lengths) == ("tokens", [([7], [9])] * 2)
    assert read_scored(write(tmp_path, [counted, PAIR])).unit == "characters"
    bare = {"reward_chosen": 1, "reward_rejected": 0}
    without = read_scored(write(tmp_path, [bare]))
    assert without.lengths is None and without.verdict is not None and without.verdict.length is None


def test_messages_count_what_they_say(tmp_path: Path) -> None:
    row = PAIR | {"chosen": CHAT, "rejected": [CHAT[0]]}
    assert read_scored(write(tmp_path, [row])).lengths == [([len("Hi\nHello")], [2])]


def test_rows_of_several_answers_are_grouped_by_their_subset(tmp_path: Path) -> None:
    rows = [MANY | {"subset": "Math", "reward_chosen": [2, 1]}, MANY | {"subset": "Focus"}]
    found = read_scored(write(tmp_path, rows))
    assert (found.kind, found.eval_by, found.groups) == (ANSWERS, "subset", ["Math", "Focus"])
    assert found.lengths == [([2, 1], [3])] * 2
    assert found.verdict is None and found.best_of_n is not None
    assert (found.best_of_n.rows, found.best_of_n.left_out) == (1, 1)
    assert found.finite[0].tolist() == [2, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("row", "lengths"),
    [
        ({"text": "abc", "reward": 1.5}, [3]),
        ({"messages": CHAT, "reward": 1.5, "tokens": 4}, [4]),
        ({"prompt": "p", "completions": ["a", "bc"], "rewards": [1.5, 2]}, [1, 2]),
    ],
)
def test_rewards_alone_are_read_without_a_verdict(tmp_path: Path, row: dict[str, Any], lengths: list[int]) -> None:
    found = read_scored(write(tmp_path, [row]))
    assert (found.kind, found.verdict, found.best_of_n) == (REWARDS, None, None)
    assert found.lengths == [(lengths, [])] and found.finite[0][0] == 1.5


def test_any_column_can_group_the_rows(tmp_path: Path) -> None:
    rows = [PAIR | {"source": label} for label in ("web", None, 3, "web")]
    found = read_scored(write(tmp_path, rows), eval_by="source")
    assert found.groups == ["web", "none", "3", "web"]
    assert found.verdict is not None and list(found.verdict.groups) == ["3", "none", "web"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("{\n", "line 1 is no JSON: "),
        ('{"reward": 1}\n[1]\n', "line 2 is no JSON object"),
        ('{"chosen": "a"}\n', r"has no rewards: its columns are chosen. Score it first: `trl-tpu score"),
        ('{"reward": "high"}\n', 'row 0: `reward` is to be a number or a list of numbers, not "high"'),
        ('{"reward": true}\n', "`reward` is to be a number"),
        ('{"rewards": []}\n', "`rewards` is to be a number"),
        (
            '{"reward_chosen": 1, "reward_rejected": 2}\n{"reward_chosen": [1], "reward_rejected": [2]}\n',
            "row 1: its rewards are to be numbers, as in the first row",
        ),
        ('{"reward_chosen": 1, "reward_rejected": [2]}\n', "row 0: its rewards are to be numbers"),
        (
            '{"reward_chosen": [1], "reward_rejected": [2]}\n{"reward_chosen": [1]}\n',
            "row 1: its rewards are to be lists, as in the first row",
        ),
        ('{"reward": 1, "by": 1}\n{"reward": 2}\n', "row 1 of .* has no 'by'; it has reward"),
    ],
)
def test_what_is_no_scored_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "scored.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_scored(path, "by" if '"by"' in text else None)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_scored(tmp_path / "none.jsonl")
    for name, message in (("x.csv", "is none of .jsonl, .json, .parquet"), ("x.parquet", "cannot be read as Parquet")):
        (tmp_path / name).write_text("reward\n1\n")
        with pytest.raises(UserError, match=message):
            read_scored(tmp_path / name)


def test_null_rewards_are_not_numbers_of_a_verdict(tmp_path: Path) -> None:
    without = {name: value for name, value in PAIR.items() if name != "reward_chosen"}
    found = read_scored(write(tmp_path, [PAIR | {"reward_chosen": None}, without]))
    assert all(math.isnan(chosen[0]) for chosen, _ in found.rewards)
    with pytest.raises(UserError, match="None of 2 pairs has two finite rewards"):
        assert found.verdict


BROKEN = {"reward_chosen": None, "reward_rejected": None, "not_scored": "line 3: no JSON"}


@pytest.mark.parametrize(("row", "lengths"), [(PAIR, ([3], [1])), (MANY | {"reward_chosen": [2, 1]}, ([2, 1], [3]))])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_without_any_reward_is_left_out_and_takes_nothing_from_the_others(
    tmp_path: Path, row: dict[str, Any], lengths: Any, place: int
) -> None:
    """A broken line has no columns but those of the scores, and null instead of a list."""
    rows = [row | {"subset": "Math"}, row | {"subset": "Focus"}]
    rows.insert(place, BROKEN)
    found = read_scored(write(tmp_path, rows))
    judged = found.verdict or found.best_of_n
    assert judged is not None and judged.left_out == 1 and judged.groups.keys() == {"Math", "Focus"}
    assert found.lengths is not None and found.finite[1] is not None
    assert [own for own in found.lengths if any(map(any, own))] == [lengths] * 2
    assert found.finite[1].tolist() == [*lengths[0], *lengths[1]] * 2


def test_a_file_of_which_nothing_was_scored_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="None of 2 pairs has two finite rewards"):
        assert read_scored(write(tmp_path, [BROKEN, BROKEN])).verdict
