"""Every bad input of the tables ends the command with status 2 and one line that says what, where and how to mend it.

The command runs as a user would start it, in this process (a few in one of their own); whatever a case is about, the
output folder holds the files of an earlier run, and nothing there or anywhere beside it may change.
"""

import os
from pathlib import Path
from shutil import copytree

import apart
import pytest
from bad_config_cases import CONFIGURATION
from bad_data_cases import DATA
from bad_input import Case, Job
from bad_model_cases import MODELS
from places import ROOT

from trl_tpu import cli
from trl_tpu.checkpoint.run_folder import RUN_FILE

CASES: dict[str, Case] = CONFIGURATION | DATA | MODELS


@pytest.fixture
def job(good_model: Path, tmp_path: Path) -> Job:
    """A job that works, over the results of an earlier one."""
    copytree(good_model, tmp_path / "model")
    copytree(good_model, tmp_path / "out")
    made = Job(tmp_path)
    made.write_pairs(4)
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(stderr: str, command: str) -> str:
    """The one line of the error; libraries may have logged above it, but nobody has printed a traceback."""
    assert "Traceback" not in stderr
    told = [line for line in stderr.splitlines() if line.startswith(f"trl-tpu {command}: error: ")]
    assert len(told) == 1, stderr
    hint = f"See `trl-tpu {command} --help` for the flags."
    assert stderr.splitlines()[-1] in (told[0], hint)
    return told[0]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_by_one_line_and_nothing_is_written(
    case: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES[case].spoil(job)
    before = files(job.folder)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["reward", *job.words()])
    told = refusal(capsys.readouterr().err, "reward")
    assert exit_.value.code == 2
    assert [words for words in CASES[case].words if words not in told.replace(str(job.folder), "DIR")] == [], told
    written = files(job.folder)
    if "stream" in case:  # is read in training, which has begun to be a run
        written.pop(str(job.folder / "out" / RUN_FILE), None)
    assert written == before


def test_the_job_that_the_cases_spoil_is_good(job: Job) -> None:
    assert cli.main(["reward", *job.words()]) == 0
    assert (job.folder / "out" / "checkpoint-1" / "trainer_state.json").exists()


@pytest.mark.parametrize("case", ["a tab in YAML", "half of the weights"])
def test_a_process_ends_with_status_2_and_no_traceback(case: str, job: Job) -> None:
    CASES[case].spoil(job)
    before = files(job.folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "USE_TORCH_XLA": "0"}
    done = apart.python("-m", "trl_tpu.cli", "reward", *job.words(), environment=environment)
    told = refusal(done.stderr, "reward")
    assert done.returncode == 2
    assert [words for words in CASES[case].words if words not in told.replace(str(job.folder), "DIR")] == []
    assert files(job.folder) == before
    assert "Model saved" not in done.stdout


def test_what_was_not_foreseen_keeps_its_traceback(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a fault of ours or of a library")

    monkeypatch.setattr("trl_tpu.scripts.reward.main", fail)
    with pytest.raises(ValueError, match="a fault of ours"):
        cli.main(["reward", *job.words()])


def test_a_bad_row_in_a_worker_of_the_loader_is_told_as_one_in_this(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's loader makes of a worker's traceback the message of the same error in this process."""
    CASES["no answer"].spoil(job)
    job.flags |= {"dataset_streaming": "true", "dataloader_num_workers": "1"}
    with pytest.raises(SystemExit):
        cli.main(["reward", *job.words()])
    (told,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-tpu reward: error: "))
    assert told.startswith("trl-tpu reward: error: Row 1 of the train dataset: `chosen` is null")


def test_code_that_a_folder_brings_is_not_run(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even of a folder whose architecture transformers has, which is loaded with transformers' own code."""
    CASES["code in the folder"].spoil(job)
    with pytest.raises(SystemExit):
        cli.main(["reward", *job.words()])
    assert not (job.folder / "code-ran").exists()
    config = (job.model / "config.json").read_text()
    (job.model / "config.json").write_text(config.replace('"model_type": "own"', '"model_type": "llama"'))
    assert cli.main(["reward", *job.words()]) == 0
    assert not (job.folder / "code-ran").exists()


@pytest.mark.parametrize("case", ["no such model", "half of the weights", "a broken config.json", "no tokenizer"])
def test_scoring_refuses_bad_models_as_training_does(case: str, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    CASES[case].spoil(job)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["score", "--model_name_or_path", job.words()[1], "--text", "a"])
    assert exit_.value.code == 2
    told = refusal(capsys.readouterr().err, "score")
    assert CASES[case].words[0] in told.replace(str(job.folder), "DIR"), told
