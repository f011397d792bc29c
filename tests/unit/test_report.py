"""The command `report`: a self-contained page that escapes data, and separate pictures."""

import importlib.util
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from preference_rows import write_jsonl

from trl_tpu import cli
from trl_tpu.errors import UserError
from trl_tpu.report import pages as page
from trl_tpu.report.pages import read_run, verdict_file_name

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac$"


def scored(path: Path, **more: Any) -> Path:
    def row(number: int) -> dict[str, Any]:
        answers = {
            "chosen": "a" * (1 + number % 7) + HOSTILE * 30,
            "rejected": [{"role": "assistant", "content": HOSTILE}],
        }
        rewards = {"reward_chosen": (number * 7 % 11) / 4, "reward_rejected": 1.0 if number else None}
        tokens = {"tokens_chosen": 1 + number % 7, "tokens_rejected": 3}
        return {"prompt": HOSTILE, **answers, **rewards, **tokens, "subset": HOSTILE if number % 2 else "plain"} | more

    return write_jsonl(path, list(map(row, range(30))))


def history(steps: int = 6, scale: float = 1.0) -> list[dict[str, Any]]:
    logs: list[dict[str, Any]] = []
    for step in range(2, 2 * steps + 1, 2):
        logs.append({"step": step, "loss": scale / step, "learning_rate": 1e-3, "tokens_per_second": 10.0 * step})
        if step % 4 == 0:
            logs.append({"step": step, "eval_loss": 2 * scale / step, "eval_accuracy": 0.7, "eval_runtime": 1.0})
    return logs


def write_state(folder: Path, logs: list[dict[str, Any]], step: int = 12) -> None:
    state = {"log_history": logs, "global_step": step, "max_steps": 12}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def run_folder(folder: Path, logs: list[dict[str, Any]]) -> Path:
    """Create the folder of a run that was resumed at step 4, with two checkpoints."""
    for step in (4, 12):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        write_state(folder / f"checkpoint-{step}", [each for each in logs if each["step"] <= step], step)
    (folder / "_run.json").write_text('{"run": "x", "resumed_at": [4]}')
    return folder


class Elements(HTMLParser):
    """Parser that collects the elements of a page, their attributes, and the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_is_self_contained_and_escapes_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", history())
    assert cli.main(["report", str(run)]) == 0
    own = (run / "report" / "index.html").read_bytes()
    assert cli.main(["report", str(run), str(scored(tmp_path / "scored.jsonl"))]) == 0
    folder = run / "report-scored"
    assert f"Report written to {folder / 'index.html'}" in capsys.readouterr().out
    assert (run / "report" / "index.html").read_bytes() == own
    elements = Elements(folder / "index.html")
    assert {tag for tag, _ in elements.found} & {"script", "link", "iframe", "object", "form"} == set()
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    sources = [attributes["src"] or "" for tag, attributes in elements.found if tag == "img"]
    assert len(sources) == 5 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert ("http-equiv", "Content-Security-Policy") in {item for _, each in elements.found for item in each.items()}
    assert HOSTILE in elements.text, "texts of the data are escaped"
    assert max(map(len, elements.text.split("chosen"))) < 5000 and "characters ...]" in elements.text
    assert not re.search(r"(src|href)=[\"']?https?:|@import|url\(", (folder / "index.html").read_text())
    assert "12 of 12 steps" in elements.text and "It has no verdict.json" in elements.text
    written = {each.name for each in folder.iterdir()} - {"index.html", "verdict.json"}
    drawn = {"margins", "reliability", "accuracy_by_length", "accuracy_by_group", "training"}
    assert written == {f"{name}.png" for name in drawn}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in written)


def test_report_without_matplotlib_says_how_to_get_pictures(tmp_path: Path) -> None:
    found = importlib.util.find_spec
    with patch.object(page, "find_spec", lambda name: None if name == "matplotlib" else found(name)):
        assert cli.main(["report", str(scored(tmp_path / "s.jsonl"))]) == 0
    elements = Elements(tmp_path / "s-report" / "index.html")
    assert "pip install matplotlib" in elements.text and "accuracy" in elements.text
    assert "img" not in {tag for tag, _ in elements.found}


def test_run_is_read_from_its_folder_or_its_last_checkpoint(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", history())
    found = read_run(run, "run")
    assert (found.state.global_step, found.state.max_steps, found.resumed_at) == (12, 12, [4])
    assert found.series("loss") == ([2, 4, 6, 8, 10, 12], [1 / step for step in range(2, 13, 2)])
    assert found.evaluated("accuracy") == {"": ([4, 8, 12], [0.7, 0.7, 0.7])}
    earlier = history(9, scale=3.0)
    for logs, last in (([*history(), {"step": 12, "eval_accuracy": 0.9}], 0.9), (earlier, 0.7)):
        write_state(run, logs)
        found = read_run(run, "run")
        assert (found.series("loss")[0][-1], found.series("eval_accuracy")[1][-1]) == (12, last)
    assert read_run(run / "checkpoint-4", "run").state.global_step == 4
    (run / "checkpoint-best").mkdir()
    (run / "checkpoint-best" / "trainer_state.json").write_text("{}")
    assert read_run(run, "run").state.global_step == 12
    (run / "_run.json").write_text("[]")
    with pytest.raises(UserError, match="logs of "):
        read_run(run, "run")
    bare = run_folder(tmp_path / "bare", [{"step": 2, "train_runtime": 1.0}])
    assert cli.main(["report", str(bare)]) == 0
    elements = Elements(bare / "report" / "index.html")
    assert "train_runtime 1" in elements.text and "img" not in {tag for tag, _ in elements.found}


def test_report_covers_rows_of_several_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists: dict[str, Any] = {"reward_chosen": [1.0], "reward_rejected": [0.0, 2.0], "chosen": ["a"]}
    best = scored(tmp_path / "best.jsonl", rejected=["b"] * 2, **lists)
    assert cli.main(["report", str(best), "--output", str(tmp_path / "out")]) == 0
    text = Elements(tmp_path / "out" / "index.html").text
    assert "The highest reward goes to a right answer in 0.0%" in text and "rejected [0.0, 2.0], chosen [1.0]" in text
    assert "Best of several answers" in capsys.readouterr().out


def test_unreportable_input_is_rejected_in_one_line(tmp_path: Path, error_of: Callable[..., str]) -> None:
    empty = scored(tmp_path / "s.jsonl", reward_chosen=None)
    for source, name in ((tmp_path / "none", "none"), (tmp_path, "trainer_state.json"), (empty, "30 pairs")):
        assert name in error_of("report", source, "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_report_overwrites_only_files_of_a_report(tmp_path: Path, error_of: Callable[..., str]) -> None:
    source, out = scored(tmp_path / "s.jsonl"), tmp_path / "out"
    for _ in range(2):  # a report replaces its own files
        assert cli.main(["report", str(source), "--output", str(out)]) == 0
    for name, content in (("verdict.json", "changed since"), ("index.html", "mine")):
        (out / name).write_text(content)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert "--output" in error_of("report", source, "--output", out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        (out / name).unlink()


def test_verdict_files_of_evaluation_sets_have_distinct_names() -> None:
    files = {verdict_file_name(name) for name in ("a/b", "a_b", "a b", "", "ä%")}
    assert len(files) == 5 and not any("/" in file for file in files)
