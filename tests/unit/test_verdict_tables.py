"""The verdict as text: readable in a pipe, in a model card, and as JSON."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from trl_tpu.errors import UserError
from trl_tpu.evaluation.best_of_n import Answers, judge_best_of_n
from trl_tpu.evaluation.verdict import Verdict, judge_pairs
from trl_tpu.report.tables import as_markdown, print_tables, tables_of
from trl_tpu.report.verdict_file import read_verdict, write_verdict

HOSTILE = "\x1b[31m[bold]<script>|`x`*\n![a](b)"


@pytest.fixture
def verdict() -> Verdict:
    chooser = np.random.default_rng(0)
    rewards_N2 = chooser.normal(size=(200, 2)) + [1.0, 0.0]
    rewards_N2[0, 0] = math.nan
    groups = [("math", "chat", HOSTILE)[number % 3] for number in range(200)]
    return judge_pairs(rewards_N2, chooser.integers(1, 500, (200, 2)), groups=groups)


def test_a_table_in_a_pipe_has_no_escapes_and_fits_eighty_columns(verdict: Verdict) -> None:
    file = io.StringIO()
    print_tables(tables_of(verdict), file)
    text = file.getvalue()
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    lines = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert f"{verdict.accuracy.value:.4f}" in lines["accuracy"]
    assert "1 more pairs have a reward that is not finite" in " ".join(text.split())
    assert "[bold]<script>" in text, "letters are letters, and no markup"
    assert f"{verdict.groups['math'].value:.4f}" in lines["math"]


def test_markdown_rows_have_as_many_cells_as_the_header_and_no_html(verdict: Verdict) -> None:
    markdown = as_markdown(tables_of(verdict))
    for block in markdown.split("\n\n"):
        counts = {line.count("|") for line in block.splitlines()}
        assert len(counts) == 1
    assert "<" not in markdown and "![a]" not in markdown and "&lt;script>" in markdown
    assert f"| accuracy | {verdict.accuracy.value:.4f} | {verdict.accuracy.low:.3f} to" in markdown


def test_json_is_the_whole_verdict_and_null_where_nothing_is_known(verdict: Verdict, tmp_path: Path) -> None:
    write_verdict(verdict, tmp_path / "verdict.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=refuse)
    assert found["kind"] == "pairs" and found["left_out"] == 1
    assert found["accuracy"]["value"] == verdict.accuracy.value
    assert found["groups"]["math"]["count"] == verdict.groups["math"].count
    assert read_verdict(tmp_path / "verdict.json") == verdict
    rows = [Answers([3.0], [1.0], "ref:1"), Answers([4.0, 3.0], [1.0], "tied:1"), Answers([0.0], [1.0])]
    best = judge_best_of_n(rows, ["Ties", "Ties", "Math"])
    write_verdict(best, tmp_path / "verdict.json")
    found = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=refuse)
    again = read_verdict(tmp_path / "verdict.json")
    assert repr(again) == repr(best), "with nan for null, which is not equal to itself"
    assert found["kind"] == "best_of_n" and found["groups"]["Ties"]["low"] is None
    assert {each.name for each in tmp_path.iterdir()} == {"verdict.json"}
    file = io.StringIO()
    print_tables(tables_of(best), file)
    assert f"{best.mean_over_groups:.4f}" in file.getvalue() and "nan" not in file.getvalue()


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "other"}', '{"kind": "pairs", "pairs": 3}'])
def test_a_verdict_of_another_making_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(UserError, match=r"verdict.json is no verdict of ours"):
        read_verdict(tmp_path / "verdict.json")
