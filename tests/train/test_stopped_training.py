"""A SIGTERM and a time limit save and stop at the step's end; resumed, the run is the one that was not stopped."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apart
import pytest
import tiny
from places import SUPPORT
from stopping import STEPS, At, later, logged, make_trainer, sigterm

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.background import NOT_SAVED
from trl_tpu.checkpoint.run_folder import STAGING_FOLDER
from trl_tpu.cli import main as command
from trl_tpu.scripts import reward
from trl_tpu.scripts import sigterm as sigterm_of_command
from trl_tpu.training import preemption
from trl_tpu.training.preemption import SIGTERM, TIME_LIMIT, UNFINISHED, Unfinished


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = tiny.made_up_pairs(40)
    texts = [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]]
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), texts, hidden=16, layers=1)


DROPOUT = {"model_init_kwargs": {"attention_dropout": 0.5}, "packing": False}


def note_in(checkpoint: str) -> Any:
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    return state["stateful_callbacks"]["Preemption"]["attributes"]


@pytest.mark.parametrize(
    ("event", "step", "stopped_at", "settings"),
    [
        ("on_step_begin", 1, 2, {}),
        ("on_step_begin", 1, 2, {"eval_strategy": "steps", "eval_steps": 2}),
        ("on_prediction_step", 2, 2, {"eval_strategy": "steps", "eval_steps": 2}),
        ("on_prediction_step", 2, 2, {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best"}),
        ("on_step_begin", 2, 3, {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch"}),
        ("on_prediction_step", 3, 3, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
        ("on_step_begin", 5, 6, {"eval_strategy": "steps", "eval_steps": 3}),
        ("on_train_begin", 0, 1, {}),
        ("on_step_begin", 1, 2, {"eval_strategy": "steps", "eval_steps": 2, **DROPOUT}),
        ("on_prediction_step", 2, 2, {"eval_strategy": "steps", "eval_steps": 2, **DROPOUT}),
    ],
    ids=str,
)
def test_after_a_sigterm_the_run_goes_on_as_if_nothing_had_been(
    event: str,
    step: int,
    stopped_at: int,
    settings: dict[str, Any],
    model: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """But for an evaluation that was due at the stop: it is left out, and the log says so."""
    settings |= {"metric_for_best_model": "loss"}
    whole = make_trainer(model, tmp_path / "whole", **settings)
    whole.train()
    stopped = make_trainer(model, tmp_path / "stopped", At(event, step, sigterm), **settings)
    with pytest.raises(Unfinished) as stop:
        stopped.train()
    assert (stop.value.code, stop.value.reason) == (UNFINISHED, SIGTERM)
    assert stop.value.checkpoint == str(tmp_path / "stopped" / f"checkpoint-{stopped_at}")
    assert note_in(stop.value.checkpoint)["stopped_by"] == SIGTERM
    evaluated = [log["step"] for log in whole.state.log_history if "eval_loss" in log]
    assert not any("eval_loss" in log and log["step"] == stopped_at for log in stopped.state.log_history)
    assert (f"evaluation due at step {stopped_at} is left out" in caplog.text) == (stopped_at in evaluated)

    resumed = make_trainer(model, tmp_path / "stopped", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    assert resumed.stopped_by is None
    assert logged(resumed) == [log for log in logged(whole) if "eval_loss" not in log or log["step"] != stopped_at]
    for name, weight in whole.model.state_dict().items():
        assert weight.equal(resumed.model.state_dict()[name]), name


def test_a_sigterm_in_the_evaluation_before_training_stops_after_the_first_step(model: str, tmp_path: Path) -> None:
    """That evaluation belongs to no step that could be saved."""
    told = At("on_prediction_step", 0, sigterm)
    trainer = make_trainer(model, tmp_path, told, eval_strategy="steps", eval_steps=4, eval_on_start=True)
    with pytest.raises(Unfinished) as stop:
        trainer.train()
    assert (stop.value.checkpoint, stop.value.saved) == (str(tmp_path / "checkpoint-1"), True)
    assert [log["step"] for log in trainer.state.log_history if "eval_loss" in log] == [0]


@pytest.mark.parametrize("save_strategy", ["no", "steps", "epoch", "best"])
def test_a_time_limit_stops_train_and_what_was_due_is_done(
    save_strategy: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "training_time_limit": "1h",
        "save_strategy": save_strategy,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    }
    trainer = make_trainer(model, tmp_path, At("on_step_begin", 3, later(monkeypatch, 3601)), **settings)
    output = trainer.train()
    assert (output.global_step, trainer.stopped_by) == (4, TIME_LIMIT)
    assert trainer.stop_checkpoint == str(tmp_path / "checkpoint-4")
    assert note_in(trainer.stop_checkpoint) == {"stopped_by": TIME_LIMIT}
    assert [log["step"] for log in trainer.state.log_history if "eval_loss" in log] == [2, 4]
    resumed = make_trainer(model, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)  # with an hour of its own
    assert resumed.state.global_step == STEPS
    assert resumed.stopped_by is None
    whole = make_trainer(model, tmp_path / "whole", **(settings | {"training_time_limit": None}))
    whole.train()
    assert logged(resumed) == logged(whole)


def test_a_time_limit_that_ends_with_the_last_step_stops_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = At("on_step_begin", STEPS - 1, later(monkeypatch, 3601))
    trainer = make_trainer(model, tmp_path, forward, training_time_limit="1h")
    trainer.train()
    assert (trainer.stopped_by, list(tmp_path.glob("checkpoint-*"))) == (None, [])


def test_the_checkpoint_to_go_on_from_stays_beside_the_best(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where save_total_limit=1, a Trainer that ends deletes all checkpoints but the best."""
    trainer = make_trainer(
        model,
        tmp_path,
        At("on_step_begin", 4, later(monkeypatch, 61)),
        training_time_limit="1m",
        load_best_model_at_end=True,
        metric_for_best_model="mean_reward",
        greater_is_better=False,
        learning_rate=0.0,  # so that the first one stays the best
        save_total_limit=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-5"]
    assert trainer.args.save_total_limit == 1


@pytest.mark.parametrize("save_strategy", ["no", "best"])
def test_minutes_that_passed_save(
    save_strategy: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice at the second step and once at the fifth: no save follows by itself."""
    trainer = make_trainer(
        model,
        tmp_path,
        At("on_step_begin", 1, later(monkeypatch, 91)),
        At("on_step_begin", 4, later(monkeypatch, 91)),
        save_interval_minutes=1.5,
        save_strategy=save_strategy,
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.0,
        metric_for_best_model="loss",
    )
    trainer.train()
    best = {"checkpoint-1"} if save_strategy == "best" else set()
    assert {folder.name for folder in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-5"} | best


def test_a_stop_that_could_not_save_has_a_status_of_its_own(model: str, tmp_path: Path) -> None:
    def spoil() -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / STAGING_FOLDER).write_text("where checkpoints are written first is no folder")

    spoiled = At("on_step_end", 1, spoil)
    with pytest.raises(Unfinished, match="checkpoint-2 could not be saved") as stop:
        # however the folder is spelled
        make_trainer(model, f"{tmp_path}/./out//", At("on_step_begin", 1, sigterm), spoiled).train()
    assert (stop.value.code, stop.value.saved) == (NOT_SAVED, False)


def test_the_handler_is_there_in_training_only(model: str, tmp_path: Path) -> None:
    def own(*_: Any) -> None:
        raise AssertionError("nothing was sent outside training")

    handlers: list[Any] = []
    at_start = At("on_train_begin", 0, lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, own)
    try:
        trainer = make_trainer(model, tmp_path, at_start, max_steps=1)
        assert signal.getsignal(signal.SIGTERM) is own
        trainer.train()
        assert handlers[0] is not own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_finds_the_handler_of_before(model: str, tmp_path: Path) -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        twice = At("on_step_begin", 1, lambda: (sigterm(), sigterm()))  # type: ignore[arg-type, return-value]
        with pytest.raises(Unfinished):
            make_trainer(model, tmp_path, twice).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert arrived == [signal.SIGTERM]


def test_outside_the_main_thread_training_goes_without_a_handler(model: str, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1


def test_the_command_asks_to_be_started_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes with each look at the clock. Nothing that is for a trained model is done."""
    ticks = itertools.count(step=61)
    monkeypatch.setattr(preemption.time, "monotonic", lambda: next(ticks))
    tiny.made_up_pairs(24).to_json(tmp_path / "pairs.jsonl")
    words = ["--model_name_or_path", model, "--dataset_name", str(tmp_path / "pairs.jsonl"), "--bf16", "false"]
    words += ["--output_dir", str(tmp_path / "out"), "--report_to", "none", "--training_time_limit", "1m"]
    with pytest.raises(SystemExit) as stop:
        command(["reward", *words])
    assert stop.value.code == UNFINISHED
    assert note_in(str(tmp_path / "out" / "checkpoint-1"))["stopped_by"] == TIME_LIMIT
    assert not list((tmp_path / "out").glob("*.safetensors"))


SCRIPT = """
import os, pathlib, subprocess, sys, time
sys.path[:0] = [sys.argv[1]]
from stopping import At, make_trainer, sigterm
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
    """A command that hears SIGTERM in this process, whose own handler is put back."""
    tiny.made_up_pairs(16).to_json(tmp_path / "pairs.jsonl")
    before = signal.getsignal(signal.SIGTERM)
    words = ["reward", "--model_name_or_path", model, "--dataset_name", str(tmp_path / "pairs.jsonl")]
    words += ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--report_to", "none"]
    yield [*words, "--per_device_train_batch_size", "2", "--save_strategy", "no"]
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("during", ["make_parser", "load_data", "RewardTrainer"])
def test_a_sigterm_before_training_ends_the_command_as_one_in_training_does(
    during: str, command_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the folder of the run is not known yet, and beside checkpoints of an older run."""
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


@pytest.mark.usefixtures("command_words")
def test_a_worker_of_the_command_ends_as_any_process(tmp_path: Path) -> None:
    sigterm_of_command.listen()
    sigterm_of_command.end_command(lambda: str((tmp_path / "ended").write_text("")))
    if (worker := os.fork()) == 0:
        # a handler would not be run in a worker that is about to wait
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    assert not (tmp_path / "ended").exists()


def test_a_sigterm_after_training_leaves_a_complete_model(
    command_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RewardTrainer.save_model

    def stopped(self: RewardTrainer, *args: Any, **kwargs: Any) -> None:
        sigterm()
        save(self, *args, **kwargs)

    monkeypatch.setattr(RewardTrainer, "save_model", stopped)
    assert command(command_words) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("event", "step", "times", "status"),
    [
        ("on_step_begin", 2, "1", UNFINISHED),  # saved; and nothing after train() has run
        ("on_step_begin", 2, "all", UNFINISHED),  # as when a machine shuts down: workers that load data, too
        ("on_step_begin", 2, "2", -signal.SIGTERM),  # killed, as without us
        pytest.param("on_train_end", 0, "1", -signal.SIGTERM, marks=pytest.mark.long),  # nothing was left to stop
    ],
)
def test_what_a_script_ends_with(event: str, step: int, times: str, status: int, model: str, tmp_path: Path) -> None:
    words = ["-c", SCRIPT, str(SUPPORT), model, str(tmp_path), event, str(step), times]
    done = apart.python(*words, environment=dict(os.environ))
    assert done.returncode == status, done.stderr
    assert "trained" not in done.stdout
    assert (tmp_path / "checkpoint-3").is_dir() == (status == UNFINISHED)
