"""Every bad input in the table ends the command with status 2 and one line that names it, and writes nothing.

In every case the output folder holds the files of an earlier run, and no file in it or next to it may change. To add a
case, add a row: its name, a function that spoils the good `Job`, and the setting, file, line, row or column that the
error must name. Rules with a direct test of their checking function need no row here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from trl_tpu import cli
from trl_tpu.checkpoint.folders import RUN_FILE

PAIR = {"prompt": "Count on from 1:", "chosen": " 2 3 4", "rejected": " 4 2"}
FLAGS = {"model_name_or_path": "{folder}/model", "dataset_name": "{folder}/pairs.jsonl", "output_dir": "{folder}/out"}
FLAGS |= {"bf16": "false", "report_to": "none", "max_steps": "1", "per_device_train_batch_size": "2"}
FLAGS |= {"gradient_checkpointing": "false"}


@dataclass
class Job:
    """A working command: a folder with ``model/``, ``pairs.jsonl`` and ``out/``, and flags. Each case spoils one."""

    folder: Path
    flags: dict[str, str] = field(default_factory=lambda: dict(FLAGS))

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def words(self) -> list[str]:
        named = {name: text.replace("{folder}", str(self.folder)) for name, text in self.flags.items()}
        return [word for name, text in named.items() for word in (f"--{name}", text)]


Spoil = Callable[[Job], Any]


def flags(**values: Any) -> Spoil:
    """Return a change that sets command-line flags over the good ones."""
    return lambda job: job.flags.update({name: str(value) for name, value in values.items()})


GOOD_LINE = json.dumps(PAIR).encode()


def third_line(content: bytes) -> Spoil:
    """Return a change that adds a line after two good lines of the data file."""
    return lambda job: (job.folder / "pairs.jsonl").write_bytes(b"\n".join([GOOD_LINE, GOOD_LINE, content]))


def file(name: str, content: bytes) -> Spoil:
    """Return a change that replaces the data file."""

    def spoil(job: Job) -> None:
        (job.folder / name).parent.mkdir(exist_ok=True)
        (job.folder / name).write_bytes(content)
        job.flags["dataset_name"] = f"{job.folder}/{name}"

    return spoil


def mixture_without_a_path(job: Job) -> None:
    (job.folder / "c.yaml").write_text("datasets: [{pth: x}]")
    job.flags["config"] = "{folder}/c.yaml"


def empty_folder(flag: str) -> Spoil:
    return both(lambda job: (job.folder / "empty").mkdir(), flags(**{flag: "{folder}/empty"}))


def both(*spoils: Spoil) -> Spoil:
    return lambda job: [spoil(job) for spoil in spoils]


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Return a change to one of the model's JSON files."""

    def spoil(job: Job) -> None:
        value = json.loads((job.model / name).read_text())
        change(value)
        (job.model / name).write_text(json.dumps(value))

    return spoil


def model_file(name: str, content: bytes | None) -> Spoil:
    """Return a change that writes or removes one of the model's files."""
    return lambda job: (job.model / name).unlink() if content is None else (job.model / name).write_bytes(content)


def truncate_weights(job: Job) -> None:
    """Truncate the weights, as an interrupted download does."""
    content = (job.model / WEIGHTS).read_bytes()
    (job.model / WEIGHTS).write_bytes(content[: len(content) // 2])


def split_into_shards(job: Job) -> None:
    """Split the weights into two files with an index, as large models do."""
    weights = load_file(job.model / WEIGHTS)
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], SECOND: names[1::2]}
    for name, part in parts.items():
        save_file({weight: weights[weight] for weight in part}, job.model / name, metadata={"format": "pt"})
    (job.model / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": {weight: name for name, part in parts.items() for weight in part}}
    (job.model / INDEX).write_text(json.dumps(index))


def add_code(job: Job) -> None:
    """Add Python classes to the model; importing them would create a file."""
    classes = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    edit_json("config.json", lambda c: c.update(auto_map=classes, model_type="own"))(job)
    ran = job.folder / "code-ran"
    model_file("own.py", f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n".encode())(job)


WEIGHTS, SECOND, INDEX = "model.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"

#: Name of a case: a function that spoils a good job, and a pattern for the error.
CASES: dict[str, tuple[Any, ...]] = {
    # flags
    "a misspelled flag": (flags(lerning_rate=1), "did you mean --learning_rate"),
    "a mixture without a path": (mixture_without_a_path, "DatasetConfig", "'pth'"),
    "no such sharding plan": (flags(sharding_plan="{folder}/p.yaml"), "DIR/p.yaml"),
    "no model": (lambda job: job.flags.pop("model_name_or_path"), "`--model_name_or_path`"),
    "no dataset": (lambda job: job.flags.pop("dataset_name"), "`datasets`", "`dataset_name`"),
    "evaluation without a split": (flags(do_eval="true"), "split 'test'", "'train'", "test_split_size"),
    "an unknown field of accelerate": (flags(accelerator_config='{"x": 1}'), "'x'"),
    # data
    "an index of files elsewhere": (
        both(split_into_shards, edit_json(INDEX, lambda index: index["weight_map"].update(x="a/../../private"))),
        f"DIR/model/{INDEX}",
        "'a/../../private'",
    ),
    # flags that only transformers, accelerate or torch reject
    "lengths that no row has, in training": (flags(group_by_length="true"), "lengths", "input_ids"),
    "a seed that is too large": (flags(seed=2**40), "2**32"),
    "a name that the Hub rejects, in training": (flags(push_to_hub="true", hub_model_id="a/b/c"), "a/b/c"),
    "an optimizer that is not installed, in training": (flags(optim="galore_adamw"), "galore_torch"),
    "an empty file": (file("e.jsonl", b""), "DIR/e.jsonl is empty"),
    "an empty table": (file("e.csv", b"chosen,rejected\n"), "DIR/e.csv", "no data"),
    "no such file": (flags(dataset_name="{folder}/no.jsonl"), "DIR/no.jsonl"),
    "an empty folder of data": (empty_folder("dataset_name"), "DIR/empty", ".jsonl"),
    "a file of another kind": (file("d.xyz", b"a"), "DIR/d.xyz", ".jsonl"),
    "a broken line": (third_line(b'{"chosen": "a", "rej'), "DIR/pairs.jsonl", "row 2"),
    "a file that is not compressed": (file("d.jsonl.gz", b"{}"), "DIR/d.jsonl.gz", "gzip"),
    "no Parquet": (file("d.parquet", b"no"), "DIR/d.parquet", "Parquet"),
    "CSV with an empty field": (file("d.csv", b"chosen,rejected\na,\n"), "Row 0", "`rejected`"),
    "no answer": (third_line(GOOD_LINE.replace(b'" 2 3 4"', b"null")), "Row 2", "`chosen`"),
    # models
    "no such model": (flags(model_name_or_path="{folder}/no"), "DIR/no"),
    "an empty folder for a model": (empty_folder("model_name_or_path"), "DIR/empty"),
    "a broken config.json": (model_file("config.json", b'{"model_type": "llama",'), "DIR/model", "config"),
    "no model_type": (edit_json("config.json", lambda c: c.pop("model_type")), "`model_type`"),
    "a model that classifies no text": (edit_json("config.json", lambda c: c.update(model_type="clip")), "CLIPConfig"),
    "no weights": (model_file(WEIGHTS, None), "model.safetensors", "DIR/model"),
    "half of the weights": (truncate_weights, "DIR/model", "SafetensorError"),
    "a shard that is missing": (both(split_into_shards, model_file(SECOND, None)), SECOND),
    "a bad pickle": (
        both(model_file(WEIGHTS, None), model_file("pytorch_model.bin", b"no")),
        "DIR/model",
        "Weights only",
    ),
    "no tokenizer": (model_file("tokenizer.json", None), "DIR/model", "tokenizer"),
    "code in the folder": (add_code, "DIR/model", "`trust_remote_code=True`"),
}


@pytest.fixture
def job(good_model: Path, tmp_path: Path) -> Job:
    """Return a working job with an output folder that holds the results of an earlier run."""
    copytree(good_model, tmp_path / "model")
    copytree(good_model, tmp_path / "out")
    (tmp_path / "pairs.jsonl").write_bytes(b"\n".join([GOOD_LINE] * 4))
    return Job(tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_in_one_line_and_writes_nothing(case: str, job: Job, error_of: Callable[..., str]) -> None:
    spoil, *words = CASES[case]
    spoil(job)
    before = files(job.folder)
    told = error_of("reward", *job.words()).replace(str(job.folder), "DIR")
    assert [word for word in words if word not in told] == [], told
    written = files(job.folder)
    if "stream" in case or "in training" in case:  # a stream is read during training, after the run has begun
        written.pop(str(job.folder / "out" / RUN_FILE), None)
    assert written == before


def test_unexpected_error_keeps_its_traceback(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a bug in this package or a library")

    monkeypatch.setattr("trl_tpu.scripts.reward.main", fail)
    with pytest.raises(ValueError, match="a bug in this package"):
        cli.main(["reward", *job.words()])


def test_bad_row_in_a_loader_worker_is_reported_in_one_line(job: Job, error_of: Callable[..., str]) -> None:
    """torch's DataLoader re-raises a worker's error with the worker's traceback as its message."""
    CASES["no answer"][0](job)
    job.flags |= {"dataset_streaming": "true", "dataloader_num_workers": "1"}
    assert error_of("reward", *job.words()).startswith("trl-tpu reward: error: Row 2 of the train dataset: `chosen`")


def test_code_in_a_model_folder_is_not_run(job: Job) -> None:
    """Code stays unused even if transformers knows the architecture and loads the model with its own classes.

    The same job without the code trains and saves.
    """
    add_code(job)
    with pytest.raises(SystemExit):
        cli.main(["reward", *job.words()])
    edit_json("config.json", lambda c: c.update(model_type="llama"))(job)
    assert cli.main(["reward", *job.words()]) == 0
    assert (job.folder / "out" / "checkpoint-1" / "trainer_state.json").exists()
    assert not (job.folder / "code-ran").exists()


@pytest.mark.parametrize("case", ["no such model", "half of the weights", "a broken config.json", "no tokenizer"])
def test_scoring_rejects_bad_models_as_training_does(case: str, job: Job, error_of: Callable[..., str]) -> None:
    spoil, *words = CASES[case]
    spoil(job)
    told = error_of("score", "--model_name_or_path", job.words()[1], "--text", "a")
    assert words[0] in told.replace(str(job.folder), "DIR")
