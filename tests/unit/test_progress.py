"""What a user sees while it trains, on a real terminal and in a pipe."""

import os
import pty
import re
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState, trainer

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.training.progress import Progress, say, use_own_progress

MakeTrainer = Callable[..., RewardTrainer]


class Terminal:
    """A terminal in the place of stderr, and what was drawn on it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 160))
        self.file = os.fdopen(theirs, "w")
        self._drawn = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._ours, 4096):
                self._drawn += part
        except OSError:  # on Linux, at its end
            pass

    def close(self) -> str:
        """What was drawn."""
        self.file.close()
        self._reader.join()
        os.close(self._ours)
        return self._drawn.decode()


@contextmanager
def drawn() -> Iterator[list[str]]:
    """What is drawn meanwhile, once it has ended."""
    terminal, found = Terminal(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.file)
        try:
            yield found
        finally:
            found.append(terminal.close())


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> MakeTrainer:
    folder, pairs = tmp_path_factory.mktemp("model"), tiny.made_up_pairs(16)
    model = tiny.save_tiny(folder, [text for row in pairs for text in row.values()])

    def make(out: Path, callbacks: Any = None, **settings: Any) -> RewardTrainer:
        defaults = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no"}
        defaults |= {"report_to": "none", "bf16": False, "disable_tqdm": False, "eval_strategy": "steps"}
        args = RewardConfig(str(out), **defaults | {"eval_steps": 2} | settings)
        return RewardTrainer(model, args, train_dataset=pairs, eval_dataset=pairs, callbacks=callbacks)

    return make


def test_in_a_pipe_there_is_a_line_a_log(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = make_trainer(tmp_path)
    capfd.readouterr()
    made.train()
    out, err = capfd.readouterr()
    assert "\r" not in out + err
    numbers = r"loss [\d.]+, accuracy [\d.]+"
    expected = [
        rf"step 1/3: {numbers}, [\de.+]+ pairs/s, \d\d:\d\d left",
        rf"step 2/3: {numbers}, [\de.+]+ pairs/s, \d\d:\d\d left",
        rf"step 2/3: evaluation, {numbers}, \d\d:\d\d left",
        rf"step 3/3: {numbers}, [\de.+]+ pairs/s",
        rf"step 3/3: evaluation, {numbers}",
        r"step 3/3: trained in \d\d:\d\d, loss [\d.]+",
    ]
    lines = [line for line in out.splitlines() if line.startswith("step")]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_on_a_terminal_the_bar_has_the_last_log_and_lines_stay_above_it(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_trainer(tmp_path)
    with drawn() as screen:
        made.train()
    last = r"3/3 \[\d\d:\d\d<\d\d:\d\d, .*, loss [\d.]+, accuracy [\d.]+, [\de.+]+ pairs/s\]"
    assert re.search(last, screen[0])
    assert "2/2" in screen[0]  # batches of the evaluation
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 6 and not any("left" in line for line in lines)


def test_a_resumed_bar_begins_where_the_run_does_and_says_what_is_waited_for() -> None:
    progress, state = Progress(), TrainerState(global_step=70, max_steps=100)
    progress.say("compiling nothing")  # before it trains
    with drawn() as screen:
        progress.on_train_begin(None, state, TrainerControl())  # type: ignore[arg-type]
        progress.say("compiling shape 2 of 4")
        progress.say("")
        state.global_step = 71
        progress.on_step_end(None, state, TrainerControl())  # type: ignore[arg-type]
        progress.on_train_end(None, state, TrainerControl())  # type: ignore[arg-type]
    states = screen[0].split("\r")
    assert any(re.match(r"compiling shape 2 of 4: +70%.*70/100", each) for each in states)
    assert any("71/100" in each and "compiling" not in each for each in states)
    assert set(re.findall(r"(\d+)/100 \[", screen[0])) == {"70", "71"} and "nothing" not in screen[0]


def test_a_notebooks_table_says_what_is_waited_for(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    notebook = pytest.importorskip("transformers.utils.notebook", exc_type=ImportError)  # it needs IPython
    tables: list[str] = []

    class Waiting(TrainerCallback):
        """As the recompile guard does: says it in a step, and that it has run in the next one."""

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            say(made, f"compiling shape {state.global_step + 1}" if state.global_step != 1 else "")
            tables.append(shown.training_tracker.html_code)

    shown = notebook.NotebookProgressCallback()
    made = make_trainer(tmp_path, disable_tqdm=True)
    for each in (shown, Waiting()):
        made.add_callback(each)
    made.train()
    assert "compiling shape 1" in tables[0] and "[0/3" in tables[0]
    assert "compiling" not in tables[1] and "compiling shape 3" in tables[2]


def test_lines_name_evaluations_and_show_whatever_else_a_user_logs(capsys: pytest.CaptureFixture[str]) -> None:
    progress, state = Progress(), TrainerState(global_step=7, max_steps=10)
    progress.on_train_begin(None, state, TrainerControl())  # type: ignore[arg-type]
    logs: list[dict[str, Any]] = [
        {
            "eval_hard_loss": 0.51234,
            "eval_hard_accuracy/math": 1.0,
            "eval_hard_accuracy": 0.75,
            "eval_hard_kappa": 0.25,
            "eval_hard_runtime": 3.0,
        },
        {"loss": 0.6, "learning_rate": 1e-4, "nonfinite": 2, "epoch": 1.0, "own": "x" * 500},
        {"spam": 1.0},
    ]
    for each in logs:
        progress.on_log(None, state, TrainerControl(), logs=each)  # type: ignore[arg-type]
    progress.on_train_end(None, state, TrainerControl())  # type: ignore[arg-type]
    progress.on_log(None, state, TrainerControl(), logs={"eval_loss": 1.0})  # type: ignore[arg-type]  # of none of ours
    assert capsys.readouterr().out.splitlines() == [
        "step 7/10: hard, loss 0.5123, accuracy 0.75, kappa 0.25",
        f"step 7/10: loss 0.6, nonfinite 2, own {'x' * 100}",
        "step 7/10: spam 1",
    ]


def test_other_processes_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress, state = Progress(), TrainerState(max_steps=2, is_world_process_zero=False)
    progress.on_train_begin(None, state, TrainerControl())  # type: ignore[arg-type]
    progress.say("compiling shape 1 of 2")
    progress.on_log(None, state, TrainerControl(), logs={"loss": 1.0})  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_it_takes_the_place_of_the_bar_alone_that_transformers_adds(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(made: RewardTrainer) -> list[type]:
        kinds = map(type, made.callback_handler.callbacks)
        return [kind for kind in kinds if issubclass(kind, ProgressCallback | PrinterCallback)]

    made = make_trainer(tmp_path)
    assert shown(made) == [Progress]
    made.remove_callback(ProgressCallback)
    assert shown(made) == []
    assert shown(make_trainer(tmp_path, disable_tqdm=True)) == [PrinterCallback]

    class Notebook(ProgressCallback):
        pass

    monkeypatch.setattr(trainer, "DEFAULT_PROGRESS_CALLBACK", Notebook)
    made = make_trainer(tmp_path, callbacks=[ProgressCallback()])
    assert shown(made) == [ProgressCallback, Notebook]
    use_own_progress(made)  # another callback is last now
    assert shown(made) == [ProgressCallback, Notebook]
