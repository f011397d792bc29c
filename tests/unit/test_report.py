"""The command `report`: one page that needs nothing else, on which data is only letters, and pictures beside it."""

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from places import ROOT

from trl_tpu import cli
from trl_tpu.evaluation.proportion import proportion
from trl_tpu.report.curves import CURVES, curve, curves_of
from trl_tpu.report.pictures import accuracy_by_group, margins
from trl_tpu.report.run_history import read_run
from trl_tpu.report.scored_rows import read_scored

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac$"


def scored(path: Path, rows: int = 30, **more: Any) -> Path:
    made = [
        {
            "prompt": HOSTILE,
            "chosen": "a" * (1 + number % 7) + HOSTILE * 30,
            "rejected": [{"role": "assistant", "content": HOSTILE}],
            "reward_chosen": (number * 7 % 11) / 4,
            "reward_rejected": 1.0 if number else None,
            "subset": HOSTILE if number % 2 else "plain",
        }
        | more
        for number in range(rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def history(steps: int = 6, scale: float = 1.0) -> list[dict[str, Any]]:
    logs: list[dict[str, Any]] = []
    for step in range(2, 2 * steps + 1, 2):
        logs.append({"step": step, "loss": scale / step, "accuracy": 0.5, "learning_rate": 1e-3, "margin": 0.1 * step})
        if step % 4 == 0:
            evaluated = {"eval_loss": 2 * scale / step, "eval_accuracy": 0.7, "eval_length_only_accuracy": 0.1}
            logs.append({"step": step, **evaluated})
    return logs


def run_folder(folder: Path, logs: list[dict[str, Any]], resumed: int | None = None) -> Path:
    for step in (4, 12):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        state = {"log_history": [each for each in logs if each["step"] <= step], "global_step": step, "max_steps": 12}
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    (folder / "_run.json").write_text(json.dumps({"run": "x", "resumed_at": [] if resumed is None else [resumed]}))
    return folder


class Elements(HTMLParser):
    """Which elements a page has, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_on_a_run_and_a_file_needs_nothing_else_and_obeys_no_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", history(), 4)
    assert cli.main(["report", str(run), str(scored(tmp_path / "scored.jsonl"))]) == 0
    printed = capsys.readouterr().out
    assert f"Report written to {run / 'report' / 'index.html'}" in printed and "It prefers the chosen" in printed
    page = (run / "report" / "index.html").read_text()
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} & {"script", "link", "iframe", "object", "form"} == set()
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    sources = [attributes["src"] or "" for tag, attributes in elements.found if tag == "img"]
    assert len(sources) == 9 and all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    for source in sources:
        svg = ElementTree.fromstring(base64.b64decode(source.partition(",")[2]))
        assert svg.tag.endswith("svg") and not [each for each in svg.iter() if each.tag.endswith("script")]
    assert ("http-equiv", "Content-Security-Policy") in {item for _, each in elements.found for item in each.items()}
    assert HOSTILE in elements.text, "texts of the data are there, as letters"
    assert max(map(len, elements.text.split("chosen"))) < 5000 and "characters ...]" in elements.text
    assert not re.search(r"(src|href)=[\"']?https?:|@import|url\(", page)
    written = {each.name for each in (run / "report").iterdir()}
    assert {"index.html", "verdict.json", "margins.png", "reliability.png", "training_loss.png"} <= written
    for name in written - {"index.html", "verdict.json"}:
        assert (run / "report" / name).read_bytes().startswith(b"\x89PNG")


def test_a_page_of_somebody_else_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", history())
    (run / "report").mkdir()
    (run / "report" / "index.html").write_text("mine")
    with pytest.raises(SystemExit):
        cli.main(["report", str(run)])
    assert "no report of ours, so it stays" in capsys.readouterr().err
    assert [path.name for path in (run / "report").iterdir()] == ["index.html"]
    assert (run / "report" / "index.html").read_text() == "mine"


def test_a_report_says_what_could_not_be_shown(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", history())
    assert cli.main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    text = Elements((tmp_path / "out" / "index.html").read_text()).text
    assert "on the way of: gradient norm, speed, time of a step, memory, compiled programs, operations." in text
    assert "12 of 12" in text and "run has no verdict.json" in text
    assert "give a file of `trl-tpu score --output`" in text


def test_a_run_is_read_from_its_last_checkpoint_or_its_folder_where_that_goes_on(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", history(), 4)
    found = read_run(run)
    assert (found.name, found.step, found.max_steps, found.resumed_at) == ("run", 12, 12, (4,))
    assert found.series("loss") == ([2, 4, 6, 8, 10, 12], [1 / step for step in range(2, 13, 2)])
    assert found.evaluated("accuracy") == {"": ([4, 8, 12], [0.7, 0.7, 0.7])}
    more = [*history(), {"step": 12, "eval_accuracy": 0.9, "tokens_per_second": 5.0}]
    state = {"log_history": more, "global_step": 12, "max_steps": 12}
    (run / "trainer_state.json").write_text(json.dumps(state))
    assert read_run(run).last("eval_accuracy") == 0.9
    (run / "trainer_state.json").write_text(json.dumps(state | {"log_history": history(9, scale=3.0)}))
    assert read_run(run).series("loss")[0][-1] == 12, "the folder's is of an earlier run"
    checkpoint = read_run(run / "checkpoint-4")
    assert (checkpoint.name, checkpoint.step) == ("checkpoint-4", 4)


def test_curves_of_several_runs_are_in_the_same_axes_with_evaluations_and_resumes(tmp_path: Path) -> None:
    runs = [
        read_run(run_folder(tmp_path / "one", history())),
        read_run(run_folder(tmp_path / "two", history(scale=2.0), 4)),
    ]
    axes = Figure().subplots()
    curve(runs, CURVES[0]).draw(axes)
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["one: training", "one: evaluation", "two: training", "two: evaluation", "two: resumed at 4"]
    for number, run in enumerate(runs):
        training, evaluation = (lines[f"{run.name}: {kind}"] for kind in ("training", "evaluation"))
        assert list(training.get_ydata()) == run.series("loss")[1]
        assert list(evaluation.get_xdata()) == [4, 8, 12] and evaluation.get_marker() == "os"[number]
    styles = {(line.get_color(), line.get_linestyle()) for name, line in lines.items() if "training" in name}
    assert len({color for color, _ in styles}) == len({style for _, style in styles}) == 2


def test_what_the_machine_did_is_drawn_where_it_is_logged(tmp_path: Path) -> None:
    logs = [record | {"tokens_per_second": 10.0 * record["step"], "device_memory_gib": 3.0} for record in history()]
    pictures, missing = curves_of([read_run(run_folder(tmp_path / "run", logs))])
    names = [picture.name for picture in pictures]
    assert names[-2:] == ["training_tokens_per_second", "training_device_memory_gib"]
    assert "Speed" not in missing and "Compiled programs" in missing


def test_bars_are_the_verdicts_counts_and_groups_have_their_intervals(tmp_path: Path) -> None:
    verdict = read_scored(scored(tmp_path / "scored.jsonl")).verdict
    assert verdict is not None
    axes = Figure().subplots()
    margins({"x": verdict}).draw(axes)
    drawn = [patch.get_data() for patch in axes.patches]
    assert [sum(each.values) for each in drawn] == [
        sum(count for edge, count in zip(verdict.margins.edges, verdict.margins.counts, strict=False) if edge < 0),
        sum(count for edge, count in zip(verdict.margins.edges, verdict.margins.counts, strict=False) if edge >= 0),
    ]
    axes = Figure().subplots()
    accuracy_by_group({"x": {"a": proportion(1, 4), "b": proportion(3, 4)}}).draw(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"]
    assert sorted(axes.get_lines()[0].get_xdata()) == [0.25, 0.75]


def test_rows_of_several_answers_and_bare_rewards_are_reported_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = scored(
        tmp_path / "best.jsonl", reward_chosen=[1.0], reward_rejected=[0.0, 2.0], chosen=["a"], rejected=["b"] * 2
    )
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({"text": "a" * n, "reward": n / 3}) + "\n" for n in range(1, 9)))
    assert cli.main(["report", str(best), str(bare), "--output", str(tmp_path / "out")]) == 0
    text = Elements((tmp_path / "out" / "index.html").read_text()).text
    assert "bare.jsonl has rewards, but nothing says which answer is better." in text
    assert (
        "Its best reward goes to a right answer in 0.0% of 30 rows" in text and "rejected 2.000, chosen 1.000" in text
    )
    assert (tmp_path / "out" / "reward_by_length.png").is_file()
    assert "Best of several answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "There is no .*none. Name a run's folder, or a file of scored rows."),
        (lambda folder: folder, "has no trainer_state.json, nor has a checkpoint in it. Name the `output_dir`"),
        (lambda folder: scored(folder / "s.jsonl", reward_chosen=None), "None of 30 pairs has two finite rewards"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    make: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["report", str(make(tmp_path)), "--output", str(tmp_path / "out")])
    assert exit_.value.code == 2 and not (tmp_path / "out").exists()
    assert re.search(f"trl-tpu report: error: .*{message}", capsys.readouterr().err)


def test_a_reader_who_goes_ends_it_quietly_when_all_is_written(tmp_path: Path) -> None:
    groups = scored(tmp_path / "s.jsonl", rows=190)
    rows = [json.loads(line) | {"subset": f"a long name of group {n}"} for n, line in enumerate(groups.open())]
    groups.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [sys.executable, "-m", "trl_tpu.cli", "report", str(groups), "--output", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == ""
    assert done.returncode == 1 and (tmp_path / "out" / "index.html").is_file()


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        cli.main(["report", str(scored(tmp_path / "s.jsonl")), "--output", str(tmp_path / "file")])
    assert "cannot be written to" in capsys.readouterr().err
