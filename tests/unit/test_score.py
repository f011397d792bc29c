"""The command `score` reads rows as training does, names what it cannot score, and writes rows as they are scored."""

import json
import logging
import math
import os
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from shutil import copytree
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bad_input import Job, learned_positions
from datasets import Dataset
from preference_forms import TEMPLATE, TOOLS, assistant, user
from scored_files import read, words, write
from transformers import AutoModelForSequenceClassification

import trl_tpu
from trl_tpu import cli
from trl_tpu.errors import UserError
from trl_tpu.report.verdicts import read_scored
from trl_tpu.scripts import score

CHAT = [user("Hi"), assistant("Hello")]


@pytest.fixture
def own_model(good_model: Path, tmp_path: Path) -> Path:
    """A model that a test may spoil."""
    return copytree(good_model, tmp_path / "model")


def test_messages_are_rendered_with_their_rows_tools_and_template_arguments(good_model: Path) -> None:
    scorer = score.Scorer(str(good_model))
    scorer.tokenizer.chat_template = TEMPLATE
    others: list[dict[str, Any]] = [
        {"tools": TOOLS, "chat_template_kwargs": None},
        {"tools": json.dumps(TOOLS), "chat_template_kwargs": {"shout": "A"}},
        {"tools": None, "chat_template_kwargs": {"shout": "B"}},
    ]
    (plain,) = trl_tpu.score(scorer, [{"messages": CHAT}])
    for other in others:
        (pair,) = trl_tpu.score(scorer, [{"chosen": CHAT, "rejected": CHAT, **other}])
        (alone,) = trl_tpu.score(scorer, [{"messages": CHAT, **other}])
        assert alone["reward"] == pytest.approx(pair["reward_chosen"], abs=1e-6)
        assert alone["reward"] != plain["reward"]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"text": None},
        {"text": "a " * 99},  # beyond the model's learned positions
        {"messages": [{"role": "user", "content": None}]},
        {"messages": CHAT, "tools": "["},
    ],
)
def test_a_row_that_cannot_be_scored_is_named_and_the_others_are_scored(
    spoiled: dict[str, Any], own_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned_positions(Job(tmp_path))
    good = {key: {"text": "a", "messages": CHAT}.get(key) for key in spoiled}
    rows, output = write(tmp_path / "rows.jsonl", [good, spoiled, good]), tmp_path / "out.jsonl"
    assert cli.main(words(own_model, rows, output)) == 0
    first, second, third = read(output)
    assert first == third and isinstance(first["reward"], float) and first["not_scored"] is None
    told = f"Row 1 of the scored dataset: `{next(iter(spoiled))}`"
    assert second["reward"] is None and second["not_scored"].startswith(told)
    assert {key: second[key] for key in spoiled} == spoiled
    assert "1 of 3 rows" in caplog.text and told in caplog.text


def test_rows_of_two_forms_are_refused(good_model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    pair = {"chosen": "a", "rejected": "b"}
    both = write(tmp_path / "both.jsonl", [{**pair, "completions": ["a", "b"], "scores": [1, 2]}])
    assert "completions, scores" in refused(*words(good_model, both))
    assert "`mean` and `std`" in refused(*words(good_model, both), "--standardize")
    scored = {"reward_chosen": 1.0, "reward_rejected": 0.0, "completions": ["a", "b"], "scores": [1, 2], **pair}
    with pytest.raises(UserError, match="completions, scores"):
        read_scored(write(tmp_path / "scored.jsonl", [scored]))
    best, prompted, plain = (
        list(trl_tpu.score(str(good_model), rows, best_of_n=of_n))[-1]
        for rows, of_n in (
            ([{**pair, "completions": ["a", "b"], "scores": [1, 2]}], True),
            ([{**pair, "prompt": "p"}, {**pair, "prompt": None}], False),
            ([pair], False),
        )
    )
    assert best["completion"] in ("a", "b")
    assert prompted["reward_chosen"] == pytest.approx(plain["reward_chosen"]) and prompted["not_scored"] is None


def test_half_a_character_in_a_text_is_refused(good_model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    argv = ["score", "--model_name_or_path", good_model, "--text", "whole", "--text", "ab\ud800"]
    assert "`--text` number 2" in refused(*argv)
    for dialogue in ("ab\ud800", [user("ab\ud800")], [{"role": "user", "content": [{"text": "ab\ud800"}]}]):
        (row,) = trl_tpu.score(str(good_model), [dialogue])
        assert row["reward"] is None and "character" in row["not_scored"]
    notes = ["ß 語 😀", "\ud800", "é\udfff", "\ude00\ud83d"]
    given = [{"text": "a", "note": note} for note in notes]
    rows, output = write(tmp_path / "rows.jsonl", given), tmp_path / "out.jsonl"
    assert cli.main(words(good_model, rows, output)) == 0
    written = read(output)
    assert "ß 語 😀" in output.read_text()
    assert [{key: row[key] for key in given[0]} for row in written] == given
    assert all(isinstance(row["reward"], float) for row in written)
    told = refused(*words(good_model, rows, tmp_path / "out.parquet"))
    (partial,) = (tmp_path / "out.parquet.partial").glob("*.jsonl")
    assert "Parquet" in told and str(partial.parent) in told
    assert read(partial) == written
    assert not {path.name for path in tmp_path.iterdir() if path.suffix == ".parquet"}


def test_bad_outputs_are_rejected_before_anything_is_loaded(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(tmp_path / "data" / "rows.jsonl", [{"text": "a"}])
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for dataset, output, world, name in [
        (rows, rows, "1", "dataset itself"),
        (rows.parent, tmp_path / "data/out.jsonl", "1", "dataset itself"),
        (rows, tmp_path / "none/out.jsonl", "1", "none/out.jsonl"),
        (rows, tmp_path / "pipe", "1", "pipe"),
        (rows, tmp_path / "out.jsonl", "2", "WORLD_SIZE=2"),  # each would delete the others' partial output
    ]:
        monkeypatch.setenv("WORLD_SIZE", world)
        assert name in refused(*words(tmp_path / "no model", dataset, output))
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


TYPED = {
    "note": b"\x00\xff",
    "made": datetime(2024, 5, 6, 7, 8, 9, 10, UTC),
    "day": date(2024, 5, 6),
    "price": Decimal("1.20"),
    "weight": math.inf,
    "of": [{"at": time(1, 2)}],
}


def test_parquet_output_keeps_types_also_when_it_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = str(tmp_path / "out.parquet")
    rows = [{"row": 0, **TYPED}, {"row": 1, **TYPED, "made": None}, {"row": 2}, {"row": 3, "day": TYPED["day"]}]
    with pytest.raises(KeyboardInterrupt), score.RowsFile(output, {}, chunk=1) as file:
        for row in rows[:3]:
            file.write([row], [row])
        raise KeyboardInterrupt
    with score.RowsFile(output, {}, chunk=1) as file:
        coming = iter(rows)
        assert list(file.kept(coming)) == [[row] for row in rows[:3]]
        file.write(left := list(coming), left)
    table = pq.read_table(output)
    assert table.to_pylist() == [dict.fromkeys(rows[0]) | row for row in rows]
    kinds = {"note": pa.binary(), "made": pa.timestamp("us", "UTC"), "day": pa.date32(), "price": pa.decimal128(3, 2)}
    assert {name: table.schema.field(name).type for name in kinds} == kinds
    assert "JSON" not in caplog.text and [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_json_lines_say_once_which_columns_they_cannot_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = {"text": "a", "number": 1.5, "list": [{"a": None}]}
    for name, value in TYPED.items():
        caplog.clear()
        with score.RowsFile(str(tmp_path / "out.jsonl"), {}, chunk=1) as file:
            for row in (plain, plain | {name: value}, plain | {name: value}):
                file.write([row], [row])
        (told,) = [record.getMessage() for record in caplog.records]
        assert f" {name}:" in told
        assert [{key: row[key] for key in plain} for row in read(tmp_path / "out.jsonl")] == [plain] * 3


def test_what_is_not_finite_is_null_and_told(
    own_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(own_model)
    with torch.no_grad():
        model.score.weight.fill_(torch.finfo(torch.float32).max)
    model.save_pretrained(own_model)
    row = {"text": "a", "reward": 2.0, "weight": math.nan, "of": [math.inf, 1.0]}
    Dataset.from_list([row, {**row, "text": "b"}]).to_parquet(tmp_path / "rows.parquet")
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        assert cli.main(words(own_model, tmp_path / "rows.parquet", tmp_path / "out.jsonl")) == 1
    expected = {"reward": None, "weight": None, "of": [None, 1.0]}
    for text, written in zip("ab", read(tmp_path / "out.jsonl"), strict=True):
        assert {key: written[key] for key in ("text", *expected)} == {"text": text, **expected}
    assert "2 of 2 rows" in caplog.text and "Row 0 of the scored dataset: `text`" in caplog.text
    assert "dataset's: reward" in caplog.text, "a column that is overwritten"
