"""The verdict as text: readable in a pipe, in a model card, and as JSON."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from trl_tpu.errors import UserError
from trl_tpu.evaluation.judge import Answers, judge_best_of_n
from trl_tpu.evaluation.verdict import Verdict, judge_pairs
from trl_tpu.report.scored_rows import read_verdict, write_verdict
from trl_tpu.report.tables import as_markdown, markdown_text, printable, tables_of

HOSTILE = "\x1b[31m[bold]<script>|`x`*\n![a](b)"


@pytest.fixture
def verdict() -> Verdict:
    chooser = np.random.default_rng(0)
    rewards_N2 = chooser.normal(size=(200, 2)) + [1.0, 0.0]
    rewards_N2[0, 0] = math.nan
    groups = [("math", "chat", HOSTILE)[number % 3] for number in range(200)]
    return judge_pairs(rewards_N2, chooser.integers(1, 500, (200, 2)), groups=groups)


def test_columns_are_below_each_other_and_a_terminal_obeys_nothing(verdict: Verdict) -> None:
    text = as_markdown(tables_of({"one": verdict, "two": verdict}), printable)
    assert "\x1b" not in text and "[bold]<script>" in text, "letters are letters"
    for block in text.split("\n\n"):
        assert len(set(map(len, block.splitlines()))) == 1
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert lines["accuracy"].count(f"{verdict.accuracy.value:.4f} ({verdict.accuracy.low:.3f} to") == 2
    assert lines["math"].count(f"{verdict.groups['math'].value:.4f}") == 2


def test_markdown_rows_have_as_many_cells_as_the_header_and_no_html(verdict: Verdict) -> None:
    markdown = as_markdown(tables_of({"value": verdict}), markdown_text)
    for block in markdown.split("\n\n"):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "<" not in markdown and "![a]" not in markdown and "&lt;script>" in markdown


def test_json_is_the_whole_verdict_and_null_where_nothing_is_known(verdict: Verdict, tmp_path: Path) -> None:
    write_verdict(verdict, tmp_path / "verdict.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=refuse)
    assert found["kind"] == "pairs" and found["left_out"] == 1
    assert found["groups"]["math"]["count"] == verdict.groups["math"].count
    assert read_verdict(tmp_path / "verdict.json") == verdict
    rows = [Answers([3.0], [1.0], "ref:1"), Answers([4.0, 3.0], [1.0], "tied:1"), Answers([0.0], [1.0])]
    best = judge_best_of_n(rows, ["Ties", "Ties", "Math"])
    write_verdict(best, tmp_path / "verdict.json")
    found = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=refuse)
    assert repr(read_verdict(tmp_path / "verdict.json")) == repr(best), "with nan, which is not equal to itself"
    assert found["kind"] == "best_of_n" and found["groups"]["Ties"]["low"] is None
    assert {each.name for each in tmp_path.iterdir()} == {"verdict.json"}
    text = as_markdown(tables_of({"x": best}), printable)
    assert f"{best.mean_over_groups:.4f}" in text and "nan" not in text


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "other"}', '{"kind": "pairs", "pairs": 3}'])
def test_a_verdict_of_another_making_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(UserError, match=r"verdict.json cannot be read as a verdict"):
        read_verdict(tmp_path / "verdict.json")
