"""SIGTERM and a time limit save and stop at the end of the step; the resumed run equals an uninterrupted one."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
import torch
from environment import SUPPORT
from training import STEPS, At, advance_clock, logged, make_trainer, sigterm, trained

from trl_tpu.checkpoint.folders import STAGING_FOLDER
from trl_tpu.cli import main as command
from trl_tpu.errors import NOT_SAVED, UNFINISHED
from trl_tpu.scripts import reward
from trl_tpu.training import stopping as preemption
from trl_tpu.training.stopping import SIGTERM, TIME_LIMIT, Unfinished


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), tiny.made_up_pairs(40), hidden=16, layers=1)


EVERY_SECOND: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
DROPOUT = {"model_init_kwargs": {"attention_dropout": 0.5}, "disable_dropout": False, "packing": False}


def read_stop_note(checkpoint: str) -> Any:
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    return state["stateful_callbacks"]["Preemption"]["attributes"]


STOPS: list[tuple[str, int, dict[str, Any]]] = [
    ("on_train_begin", 0, {}),
    ("on_step_begin", 1, EVERY_SECOND | DROPOUT),
    ("on_prediction_step", 2, EVERY_SECOND | DROPOUT),
    ("on_prediction_step", 2, EVERY_SECOND | {"save_strategy": "best"}),
    ("on_step_begin", 2, {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch"}),
    ("on_step_begin", 5, {"eval_strategy": "steps", "eval_steps": 3}),
]


@pytest.mark.parametrize(("event", "step", "settings"), STOPS, ids=str)
def test_run_resumes_after_a_sigterm(event: str, step: int, settings: Any, model: str, tmp_path: Path) -> None:
    """The run equals an uninterrupted one, except that an evaluation scheduled at the stop is skipped."""
    settings |= {"metric_for_best_model": "loss"}
    stopped_at = step if event == "on_prediction_step" else step + 1  # the end of the step
    whole = trained(make_trainer(model, tmp_path / "whole", **settings))
    stopped = make_trainer(model, tmp_path / "stopped", At(event, step, sigterm), **settings)
    with pytest.raises(Unfinished) as stop:
        stopped.train()
    assert (stop.value.code, stop.value.reason) == (UNFINISHED, SIGTERM)
    assert stop.value.checkpoint == str(tmp_path / "stopped" / f"checkpoint-{stopped_at}")
    assert read_stop_note(stop.value.checkpoint)["stopped_by"] == SIGTERM
    assert not any("eval_loss" in log and log["step"] == stopped_at for log in stopped.state.log_history)

    resumed = trained(make_trainer(model, tmp_path / "stopped", **settings), resume=True)
    assert (resumed.state.global_step, resumed.stopped_by) == (STEPS, None)
    assert logged(resumed) == [log for log in logged(whole) if "eval_loss" not in log or log["step"] != stopped_at]
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def test_time_limit_stops_after_due_evaluations(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EVERY_SECOND | {"training_time_limit": "1h", "save_strategy": "best", "metric_for_best_model": "loss"}
    trainer = make_trainer(model, tmp_path, At("on_step_begin", 3, advance_clock(monkeypatch, 3601)), **settings)
    output = trainer.train()
    assert (output.global_step, trainer.stopped_by) == (4, TIME_LIMIT)
    assert trainer.stop_checkpoint == str(tmp_path / "checkpoint-4")
    assert read_stop_note(trainer.stop_checkpoint) == {"stopped_by": TIME_LIMIT}
    assert [log["step"] for log in trainer.state.log_history if "eval_loss" in log] == [2, 4]
    resumed = trained(make_trainer(model, tmp_path, **settings), resume=True)  # the resumed run has another hour
    assert (resumed.state.global_step, resumed.stopped_by) == (STEPS, None)
    whole = trained(make_trainer(model, tmp_path / "whole", **(settings | {"training_time_limit": None})))
    assert logged(resumed) == logged(whole)


def test_last_checkpoint_is_kept_with_the_best(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With save_total_limit=1, transformers' Trainer deletes all checkpoints except the best at its end."""
    settings: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "mean_reward"}
    settings |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    settings |= {"greater_is_better": False, "learning_rate": 0.0}  # the first checkpoint stays the best
    settings |= {"training_time_limit": "1h", "save_total_limit": 1}
    trainer = make_trainer(model, tmp_path, At("on_step_begin", 4, advance_clock(monkeypatch, 3601)), **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-5"]
    assert trainer.args.save_total_limit == 1


def test_save_interval_minutes_triggers_saves(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes before steps 2 and 5: one save for each, and no others."""
    waits = [At("on_step_begin", step, advance_clock(monkeypatch, 5401)) for step in (1, 4)]
    settings: dict[str, Any] = {"save_interval_minutes": 90.0, "save_strategy": "best", "eval_strategy": "steps"}
    settings |= {"metric_for_best_model": "loss", "eval_steps": 1, "learning_rate": 0.0}
    make_trainer(model, tmp_path, *waits, **settings).train()
    assert {folder.name[-1] for folder in tmp_path.glob("checkpoint-*")} == {"1", "2", "5"}  # checkpoint 1 is the best


def test_stop_that_cannot_save_has_its_own_exit_status(model: str, tmp_path: Path) -> None:
    def spoil() -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / STAGING_FOLDER).write_text("a file in place of the staging folder")

    spoiled = At("on_step_end", 1, spoil)
    with pytest.raises(Unfinished, match="checkpoint-2") as stop:
        # for every spelling of the folder
        make_trainer(model, f"{tmp_path}/./out//", At("on_step_begin", 1, sigterm), spoiled).train()
    assert (stop.value.code, stop.value.saved) == (NOT_SAVED, False)


def test_command_exits_as_unfinished(command_words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Final steps for a trained model are skipped."""
    ticks = itertools.count(step=61)  # the clock advances by a minute at each call
    monkeypatch.setattr(preemption.time, "monotonic", lambda: next(ticks))
    with pytest.raises(SystemExit) as stop:
        command([*command_words, "--training_time_limit", "1m"])
    assert stop.value.code == UNFINISHED
    assert read_stop_note(str(tmp_path / "out" / "checkpoint-1"))["stopped_by"] == TIME_LIMIT
    assert not list((tmp_path / "out").glob("*.safetensors"))


SCRIPT = """
import os, pathlib, subprocess, sys, time
sys.path[:0] = [sys.argv[1]]
from training import At, make_trainer, sigterm
model, out, event, step, times = sys.argv[2:]

def sigterm_to_all():
    kill = f"import os; os.killpg({os.getpgid(0)}, 15)"
    subprocess.run([sys.executable, "-c", kill], start_new_session=True)
    time.sleep(0.5)

acts = [sigterm_to_all] if times == "all" else [sigterm] * int(times)
ats = [At(event, int(step), act) for act in acts]
make_trainer(model, pathlib.Path(out), *ats, dataloader_num_workers=int(times == "all")).train()
print("trained")
"""


@pytest.fixture
def command_words(model: str, tmp_path: Path) -> Iterator[list[str]]:
    """Return the words of a command that handles SIGTERM in this process, and restore the handler afterwards."""
    tiny.made_up_pairs(16).to_json(tmp_path / "pairs.jsonl")
    before = signal.getsignal(signal.SIGTERM)
    given = ["reward", "--model_name_or_path", model, "--dataset_name", str(tmp_path / "pairs.jsonl")]
    given += ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--report_to", "none"]
    yield [*given, "--per_device_train_batch_size", "2", "--save_strategy", "no"]
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("during", ["load_splits", "RewardTrainer"])
def test_sigterm_before_training_ends_it(during: str, command_words: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The command ends as during training, also before its folder is known, with older checkpoints in the folder."""
    (tmp_path / "out" / "checkpoint-9").mkdir(parents=True)
    inner = getattr(reward, during)

    def stopped(*args: Any, **kwargs: Any) -> Any:
        sigterm()
        return inner(*args, **kwargs)

    monkeypatch.setattr(reward, during, stopped)
    with pytest.raises(SystemExit) as end:
        command(command_words)
    assert end.value.code == UNFINISHED
    monkeypatch.undo()
    assert command([*command_words, "--resume_from_checkpoint", "true"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


ENDS = [
    ("on_step_begin", 2, "1", UNFINISHED),  # saved, and no code after train() has run
    ("on_step_begin", 2, "all", UNFINISHED),  # the signal also reaches data workers, as in a machine's shutdown
    ("on_step_begin", 2, "2", -signal.SIGTERM),  # a second signal kills, as usual
    ("on_train_end", 0, "1", -signal.SIGTERM),  # training has already ended
]


@pytest.mark.parametrize(("event", "step", "times", "status"), ENDS)
def test_script_ends_as_expected(event: str, step: int, times: str, status: int, model: str, tmp_path: Path) -> None:
    command_words = ["-c", SCRIPT, str(SUPPORT), model, str(tmp_path), event, str(step), times]
    done = subprocesses.python(*command_words, environment=dict(os.environ))
    assert done.returncode == status, done.stderr
    assert "trained" not in done.stdout
    assert (tmp_path / "checkpoint-3").is_dir() == (status == UNFINISHED)
