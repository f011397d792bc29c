"""The command `score` reads rows as training does, names unscorable rows, and writes scored rows at once."""

import io
import json
import logging
import math
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import subprocesses
import tiny
import torch
from datasets import Dataset
from preference_rows import TEMPLATE, TOOLS, assistant, read_jsonl, score_command, user, write_jsonl
from transformers import AutoConfig, AutoModelForSequenceClassification

import trl_tpu
from trl_tpu import cli
from trl_tpu.errors import UserError
from trl_tpu.report.verdicts import read_scored
from trl_tpu.scoring import stream
from trl_tpu.scoring.scorer import Batches, Scorer
from trl_tpu.scripts import score

CHAT = [user("Hi"), assistant("Hello")]


def test_messages_are_rendered_with_tools_and_template_arguments(good_model: Path) -> None:
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


def near(row: dict[str, Any]) -> dict[str, Any]:
    """Let rewards near 1 differ by 1e-6: another process, load or batch adds float32 numbers in another order."""
    return {name: pytest.approx(each, abs=1e-6) if isinstance(each, float) else each for name, each in row.items()}


UNSCORABLE = [
    {"text": None},
    {"text": "a " * 300},  # longer than the model's learned positions
    {"messages": [{"role": "user", "content": None}]},
    {"messages": CHAT, "tools": "["},
]


@pytest.mark.parametrize("spoiled", UNSCORABLE)
def test_unscorable_row_is_named_and_others_are_scored(spoiled: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    good = {key: {"text": "a", "messages": CHAT}.get(key) for key in spoiled}
    rows, output = write_jsonl(tmp_path / "rows.jsonl", [good, spoiled, good]), tmp_path / "out.jsonl"
    assert cli.main(score_command(save(tmp_path / "model", "gpt2"), rows, output)) == 0
    first, second, third = read_jsonl(output)
    assert first == near(third) and isinstance(first["reward"], float) and first["not_scored"] is None
    told = f"Row 1 of the scored dataset: `{next(iter(spoiled))}`"
    assert second["reward"] is None and second["not_scored"].startswith(told)
    assert {key: second[key] for key in spoiled} == spoiled
    assert "1 of 3 rows" in caplog.text and told in caplog.text


def test_rows_in_two_formats_are_rejected(good_model: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    model, pair = str(good_model), {"chosen": "a", "rejected": "b"}
    several: dict[str, Any] = pair | {"completions": ["a", "b"], "scores": [1, 2]}
    both = write_jsonl(tmp_path / "both.jsonl", [several])
    assert "completions, scores" in error_of(*score_command(good_model, both))
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [pair])
    assert "`mean` and `std`" in error_of(*score_command(good_model, pairs), "--standardize")
    with pytest.raises(UserError, match="completions, scores"):
        read_scored(write_jsonl(tmp_path / "scored.jsonl", [several | {"reward_chosen": 1.0, "reward_rejected": 0.0}]))
    (best,) = trl_tpu.score(model, [several], best_of_n=True)
    assert best["completion"] in ("a", "b")
    *_, without_prompt = trl_tpu.score(model, [pair | {"prompt": "p"}, pair | {"prompt": None}])
    (plain,) = trl_tpu.score(model, [pair])
    assert without_prompt["reward_chosen"] == pytest.approx(plain["reward_chosen"])


def test_completion_is_scored_and_unread_text_is_named(good_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    scorer, asked = Scorer(str(good_model)), {"prompt": "Why?", "system": ""}
    labeled = asked | {"completion": "b", "label": True}
    rows = [asked | {"completion": "a"}, labeled, asked | {"completion": "b"}]
    (first, _, third), (_, mixed) = (list(trl_tpu.score(scorer, each)) for each in (rows, rows[1:]))
    (pair,) = trl_tpu.score(scorer, [asked | {"chosen": "a", "rejected": "b"}])
    assert [first["reward"], third["reward"]] == pytest.approx([pair["reward_chosen"], pair["reward_rejected"]])
    assert mixed["rewards"] == pytest.approx([third["reward"]]), "no label, after a row with a label"

    whole = {"prompt": "q", "messages": [user("q"), assistant("a")], "tools": None}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for row, others, named in (
        ({"prompt": None, "text": "a"}, {"prompt": "q"}, "`prompt`"),
        (whole, {"prompt": "Why?"}, "`prompt`"),
        (whole, {"system": "Be"}, "system"),
        (rows[0], {"context": "It is."}, "context"),
        (whole, {"messages": [user("q"), assistant("a") | {"reasoning_content": "It is."}]}, "`reasoning_content`"),
        (whole, {"tools": tools}, "`tools`"),
    ):
        caplog.clear()
        list(trl_tpu.score(scorer, [row, row | others, row | others]))
        (record,) = caplog.records
        assert named in record.getMessage() and "row 1" in record.getMessage().lower()


def test_lone_surrogate_in_a_text_is_rejected(good_model: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    for dialogue in ("ab\ud800", [user("ab\ud800")], [{"role": "user", "content": [{"text": "ab\ud800"}]}]):
        (row,) = trl_tpu.score(str(good_model), [dialogue])
        assert row["reward"] is None and "character" in row["not_scored"]
    notes = ["ß 語 😀", "\ud800", "é\udfff", "\ude00\ud83d"]
    given = [{"text": "a", "note": note} for note in notes]
    rows, output = write_jsonl(tmp_path / "rows.jsonl", given), tmp_path / "out.jsonl"
    assert cli.main(score_command(good_model, rows, output)) == 0
    written = read_jsonl(output)
    assert "ß 語 😀" in output.read_text()
    assert [{key: row[key] for key in given[0]} for row in written] == given
    assert all(isinstance(row["reward"], float) for row in written)
    told = error_of(*score_command(good_model, rows, tmp_path / "out.parquet"))
    (partial,) = (tmp_path / "out.parquet.partial").glob("*.jsonl")
    assert "Parquet" in told and str(partial.parent) in told
    assert read_jsonl(partial) == written
    assert not {path.name for path in tmp_path.iterdir() if path.suffix == ".parquet"}


def test_bad_outputs_are_rejected_before_anything_is_loaded(tmp_path: Path, error_of: Any, monkeypatch: Any) -> None:
    rows = write_jsonl(tmp_path / "data" / "rows.jsonl", [{"text": "a"}])
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for dataset, output, world, name in [
        (rows, rows, "1", "part of the dataset"),
        (rows.parent, tmp_path / "data/out.jsonl", "1", "part of the dataset"),
        (rows, tmp_path / "pipe", "1", "pipe"),
        (rows, tmp_path / "out.jsonl", "2", "WORLD_SIZE=2"),  # one would delete the other's partial output
    ]:
        monkeypatch.setenv("WORLD_SIZE", world)
        assert name in error_of(*score_command(tmp_path / "no model", dataset, output))
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


TYPED = {"note": b"\x00\xff", "made": datetime(2024, 5, 6, 7, 8, 9, 10, UTC), "day": date(2024, 5, 6)}
TYPED |= {"price": Decimal("1.20"), "weight": math.inf, "of": [{"at": time(1, 2)}]}


def test_parquet_output_keeps_types_also_after_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = str(tmp_path / "out.parquet")
    rows = [{"row": 0, **TYPED}, {"row": 1, **TYPED, "made": None}, {"row": 2}, {"row": 3, "day": TYPED["day"]}]
    interrupted = score.RowsFile(output, {}, chunk=1)
    for row in rows[:3]:
        interrupted.write([row], [row])
    file, coming = score.RowsFile(output, {}, chunk=1), iter(rows)
    assert list(file.written_chunks(coming)) == [[row] for row in rows[:3]]
    file.write(left := list(coming), left)
    file.finish()
    table = pq.read_table(output)
    assert table.to_pylist() == [dict.fromkeys(rows[0]) | row for row in rows]
    kinds = {"note": pa.binary(), "made": pa.timestamp("us", "UTC"), "day": pa.date32(), "price": pa.decimal128(3, 2)}
    assert {name: table.schema.field(name).type for name in kinds} == kinds
    assert "JSON" not in caplog.text and [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_json_lines_warn_once_about_columns_they_cannot_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = {"text": "a", "number": 1.5, "list": [{"a": None}]}
    for name, value in TYPED.items():
        caplog.clear()
        file = score.RowsFile(str(tmp_path / "out.jsonl"), {}, chunk=1)
        for row in (plain, plain | {name: value}, plain | {name: value}):
            file.write([row], [row])
        file.finish()
        (told,) = [record.getMessage() for record in caplog.records]
        assert f" {name}:" in told
        assert [{key: row[key] for key in plain} for row in read_jsonl(tmp_path / "out.jsonl")] == [plain] * 3


def test_nonfinite_rewards_are_null_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path / "model")
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.score.weight.fill_(torch.finfo(torch.float32).max)
    model.save_pretrained(folder)
    row = {"text": "a", "reward": 2.0, "weight": math.nan, "of": [math.inf, 1.0]}
    Dataset.from_list([row, {**row, "text": "b"}]).to_parquet(tmp_path / "rows.parquet")
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        assert cli.main(score_command(folder, tmp_path / "rows.parquet", tmp_path / "out.jsonl")) == 1
    expected = {"reward": None, "weight": None, "of": [None, 1.0]}
    for text, written in zip("ab", read_jsonl(tmp_path / "out.jsonl"), strict=True):
        assert {key: written[key] for key in ("text", *expected)} == {"text": text, **expected}
    assert "2 of 2 rows" in caplog.text and "Row 0 of the scored dataset: `text`" in caplog.text
    assert "dataset's: reward" in caplog.text, "overwritten column"


# ---- many rows: rewards equal those of single conversations; resumed by chunks; in constant memory

PAIRS = tiny.made_up_pairs(40).to_list()
TOKENIZER = tiny.tiny_tokenizer([text for row in PAIRS for text in row.values()], vocab_size=320)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    "gpt2": {"n_head": 4, "n_layer": 2, "n_embd": 32, "n_positions": 256},
    "bloom": {"n_head": 4, "n_layer": 2},  # ALiBi, scored in padded rows
}


def save(folder: Path, family: str = "llama") -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_labels": 1, "initializer_range": 0.3}
    sizes |= {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family])
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_equal_those_of_each_conversation_alone(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family)
    scorer = Scorer(str(folder), tokens_per_pass=300)
    assert (scorer.batches == scorer.padded) is (family == "bloom")

    def check(rows: list[Any], expected: Any, *columns: str) -> list[dict[str, Any]]:
        scored = list(trl_tpu.score(scorer, rows))
        found = [np.hstack([row[f"reward{column}"] for column in columns]) for row in scored]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        return scored

    texts = [row["prompt"] + row[half] for row in PAIRS for half in ("chosen", "rejected")]
    rewards_P2 = np.reshape(tiny.rewards_alone(folder, texts), (-1, 2))
    check(texts, rewards_P2.reshape(-1, 1), "")
    check(PAIRS, rewards_P2, "_chosen", "_rejected")
    many = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"], row["chosen"]]} for row in PAIRS]
    check(many, rewards_P2[:, [0, 1, 0]], "s")
    lists = [{**row, "chosen": [row["chosen"]], "rejected": [row["rejected"], row["chosen"]]} for row in PAIRS]
    for row in check(lists, rewards_P2[:, [0, 1, 0]], "_chosen", "_rejected"):
        assert (len(row["tokens_chosen"]), len(row["tokens_rejected"])) == (1, 2)

    asked = [([user(row["prompt"])], [assistant(row["chosen"])]) for row in PAIRS]
    chats = [prompt + answer for prompt, answer in asked]
    rewards_P1 = np.reshape(tiny.rewards_alone(folder, chats), (-1, 1))
    check(chats, rewards_P1, "")
    check([{"prompt": prompt, "completions": [answer] * 2} for prompt, answer in asked], rewards_P1[:, [0, 0]], "s")


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 9.0], "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
ROPES: dict[str, dict[str, Any]] = {  # rotary embeddings that change beyond 32 tokens
    "phi3": {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": LONG},
    "llama": {"max_position_embeddings": 32, "rope_parameters": DYNAMIC},
}


@pytest.mark.parametrize("family", ROPES)
def test_rope_depending_on_length_scores_exactly(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, family, FAMILIES["llama"] | ROPES[family])
    scorer = Scorer(str(save(tmp_path, family)))
    texts = [" ".join(map(str, range(count))) for count in (3, 60, 20, 12, 45, 60, 9, 14, 16, 46, 8)]
    expected = [tiny.rewards_alone(tmp_path, [text])[0] for text in texts]
    for order in (texts, texts[::-1]):  # a long text must not affect later ones
        found = {row["text"]: row["reward"] for row in trl_tpu.score(scorer, order)}
        assert [found[text] for text in texts] == pytest.approx(expected, abs=1e-5)


def test_best_answer_is_the_first_with_the_highest_reward(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": row["prompt"], "completions": [row["rejected"], row["chosen"], row["rejected"], 5], "id": number}
        for number, row in enumerate(PAIRS)
    ]
    rows[3]["completions"] = [5]
    every = list(trl_tpu.score(str(model), rows))
    source, output = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    assert cli.main([*score_command(model, source, output), "--best_of_n"]) == 0
    for row, full, best in zip(rows, every, read_jsonl(output), strict=True):
        assert best["id"] == row["id"] and "completions" not in best and "[" in best["not_scored"]
        rewards = [reward for reward in full["rewards"] if reward is not None]
        if not rewards:
            assert best["completion"] is best["reward"] is None
            continue
        assert best["reward"] == pytest.approx(max(rewards), abs=1e-6)  # see `near`
        assert best["completion"] == row["completions"][full["rewards"].index(max(rewards))]
    with pytest.raises(UserError, match="completions"):
        trl_tpu.score(str(model), PAIRS, best_of_n=True)


# runs the command in windows of 8 rows and kills it when it writes the row in the first argument
KILLED = """
import os, signal, sys
from trl_tpu import cli
from trl_tpu.scoring import stream
from trl_tpu.scripts import score
stream.WINDOW, left, json_line = 8, int(sys.argv[1]), score.json_line
def write_or_die(row):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return json_line(row)
score.json_line = write_or_die
cli.main(sys.argv[2:])
"""


def test_killed_scoring_resumes_after_complete_chunks(
    model: Path, tmp_path: Path, error_of: Any, monkeypatch: Any, capsys: Any, caplog: Any
) -> None:
    """The test of Parquet types covers resuming Parquet output."""
    rows = [{**row, "note": {"number": n, "of": [n / 7]} if n % 3 else None} for n, row in enumerate(PAIRS)]
    rows[30]["chosen"] = None  # type: ignore[assignment]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"

    def printed(output: Path) -> list[str]:
        assert cli.main(score_command(model, source, output)) == 0
        return capsys.readouterr().out.splitlines()[:-1]

    monkeypatch.setattr(stream, "WINDOW", 8)
    verdict = printed(whole)
    output.write_text("an earlier run's")
    for at, kept in ((5, 0), (20, 2), (12, 3)):  # killed in chunk 1, in chunk 3, and in chunk 2 of the rest
        subprocesses.run("-c", KILLED, str(at), *score_command(model, source, output), status=-9)
        assert output.read_text() == "an earlier run's"
        assert len(list(Path(f"{output}.partial").glob("*.jsonl"))) == kept

    other_data = ([{**rows[0], "chosen": "changed"}, *rows[1:]], rows[:9])
    for changed, flags in ((rows, ["--max_length", "9"]), *((data, []) for data in other_data)):
        write_jsonl(source, changed)
        assert f"{output}.partial" in error_of(*score_command(model, source, output), *flags)
    write_jsonl(source, rows)
    with monkeypatch.context() as upgrade:
        upgrade.setattr("trl_tpu.scripts.score.CODE", "another version")
        assert f"{output}.partial" in error_of(*score_command(model, source, output))
    assert printed(output) == verdict, "the verdict covers all rows"
    assert "24 rows" in caplog.text and read_jsonl(output) == [*map(near, read_jsonl(whole))]
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "rows.jsonl", "whole.jsonl"}
    found = read_jsonl(output)
    assert len(found) == len(rows) and found[30]["reward_chosen"] is None and "Row 30" in found[30]["not_scored"]
    assert [row["note"] for row in found] == [row["note"] for row in rows]


def test_broken_lines_have_no_reward_also_from_stdin(
    model: Path, tmp_path: Path, error_of: Any, monkeypatch: Any
) -> None:
    """`test_get_dataset.py` reads all kinds of files."""
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "a"}\n\n{"text": "b"\n[1]\n{"text": "c"}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    for dataset in (source, "-"):
        assert cli.main(score_command(model, dataset, output)) == 0
        first, *broken, last = read_jsonl(output)
        assert [(row["text"], row["not_scored"]) for row in (first, last)] == [("a", None), ("c", None)]
        assert ["line 3" in broken[0]["not_scored"], "line 4" in broken[1]["not_scored"]] == [True, True]
    source.write_text("no JSON\n")
    assert "line 1" in error_of(*score_command(model, source, output))


def test_nan_reward_does_not_spread_to_other_rows(tmp_path: Path) -> None:
    folder = save(tmp_path)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = ["Count on from 1: 2 3", "Count on from 1: 2 ~", "Count on from 1: 2 3 4", "Count on", "~"]
    (bad,) = TOKENIZER("~")["input_ids"]
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    model.save_pretrained(folder)
    scorer = Scorer(str(folder))
    expected = tiny.rewards_alone(folder, texts)
    assert np.isnan(expected).tolist() == [False, True, False, False, True]
    for batches in (scorer.batches, Batches(scorer.pad_token_id, 256, 192).planned):
        scorer.batches = batches
        scored = list(trl_tpu.score(scorer, texts))
        assert [row["reward"] or np.nan for row in scored] == pytest.approx(expected, abs=1e-5, nan_ok=True)
        assert ["the reward is nan" in (row["not_scored"] or "") for row in scored] == np.isnan(expected).tolist()


def test_bfloat16_scores_are_close_and_stored_in_float32(model: Path) -> None:
    texts = [row["prompt"] + row["chosen"] for row in PAIRS]
    scored = (trl_tpu.score(str(model), texts, bf16=bf16) for bf16 in (False, True))
    exact, near = (np.array([row["reward"] for row in rows]) for rows in scored)
    assert 1e-5 < np.abs(exact - near).max() < 0.1 * np.abs(exact).max()
    assert (near != torch.tensor(near).bfloat16().double().numpy()).any()


def test_memory_does_not_grow_with_the_number_of_rows(good_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW", 64)
    scorer = Scorer(str(good_model))

    def rows(count: int) -> Iterator[dict[str, Any]]:
        for number in range(count):
            yield {"text": f"{number} and a few bytes more", "junk": "x" * 1000}

    def peak(count: int) -> int:
        tracemalloc.reset_peak()
        assert sum(1 for _ in trl_tpu.score(scorer, rows(count))) == count
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        peak(128)
        assert peak(1500) < 1.2 * peak(300)
    finally:
        tracemalloc.stop()


def test_packed_rows_hold_shared_tokens_once() -> None:
    """`test_score_on_xla.py` counts the programs of the few planned shapes."""
    chooser = np.random.default_rng(0)
    dialogues = []
    for _ in range(30):
        prefix = chooser.integers(1, 50, chooser.integers(1, 60))
        tails = [chooser.integers(1, 50, chooser.integers(0, 30)) for _ in range(chooser.choice([1, 2, 8]))]
        dialogues += [np.concatenate([prefix, tail]).astype(np.int32) for tail in tails]
    dialogues += dialogues[:3]
    rows = [part.input_ids_RL for _, parts in Batches(0, 500, 384).unpadded(dialogues) for part in parts]
    assert sum(ids_RL.numel() for ids_RL in rows) < 0.6 * sum(map(len, dialogues))
