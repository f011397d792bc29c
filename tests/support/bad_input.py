"""Ways to spoil the input of a training command that works, for the tables of what must be refused.

The tables are in `bad_config_cases`, `bad_data_cases` and `bad_model_cases`. To add a case, add a line to one: what it
is, how it spoils the good `Job`, and the words that the one error must hold: what is wrong, where (file, line, row,
column, flag), and how to mend it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

PAIR = {"prompt": "Count on from 1:", "chosen": " 2 3 4", "rejected": " 4 2"}
CHAT = {
    "prompt": [{"role": "user", "content": "Hi"}],
    "chosen": [{"role": "assistant", "content": "Hello"}],
    "rejected": [{"role": "assistant", "content": "No"}],
}
FLAGS = {
    "model_name_or_path": "{folder}/model",
    "dataset_name": "{folder}/pairs.jsonl",
    "output_dir": "{folder}/out",
    "bf16": "false",
    "report_to": "none",
    "max_steps": "1",
    "per_device_train_batch_size": "2",
    "gradient_checkpointing": "false",
}


def save_good_model(folder: Path) -> None:
    """A tiny reward model and its tokenizer, as a checkpoint of the Hub would be."""
    tokenizer = tiny_tokenizer(["".join(PAIR.values())], vocab_size=300)
    tiny_model(tokenizer, hidden=16, layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class Job:
    """A command that works: a folder with ``model/``, ``pairs.jsonl`` and ``out/``, and flags; a case spoils one."""

    folder: Path
    flags: dict[str, str] = field(default_factory=lambda: dict(FLAGS))

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs.jsonl"

    def words(self) -> list[str]:
        return [
            word
            for name, text in self.flags.items()
            for word in (f"--{name}", text.replace("{folder}", str(self.folder)))
        ]

    def write_pairs(self, count: int) -> None:
        self.pairs.write_text("\n".join([json.dumps(PAIR)] * count))


Spoil = Callable[[Job], Any]


class Case(NamedTuple):
    """What spoils a good job, and what the error must say."""

    spoil: Spoil
    words: list[str]


def flags(**values: Any) -> Spoil:
    """Flags of the command line, over the good ones."""
    return lambda job: job.flags.update({name: str(value) for name, value in values.items()})


def without(*names: str) -> Spoil:
    return lambda job: [job.flags.pop(name) for name in names]


def config(text: str | bytes) -> Spoil:
    """A YAML file, and none of the flags that it names."""

    def spoil(job: Job) -> None:
        content = text if isinstance(text, bytes) else text.replace("{folder}", str(job.folder)).encode()
        (job.folder / "c.yaml").write_bytes(content)
        job.flags = {name: value for name, value in job.flags.items() if f"{name}:".encode() not in content}
        job.flags["config"] = "{folder}/c.yaml"

    return spoil


def lines(*added: str | bytes, after: int = 2) -> Spoil:
    """Lines of the data file, after some good ones."""
    good = json.dumps(PAIR).encode()
    return lambda job: job.pairs.write_bytes(
        b"\n".join([good] * after + [line if isinstance(line, bytes) else line.encode() for line in added])
    )


def rows(*rows: dict[str, Any]) -> Spoil:
    """All rows of the data file."""
    return lambda job: job.pairs.write_text("\n".join(json.dumps(row) for row in rows))


def both(*spoils: Spoil) -> Spoil:
    return lambda job: [spoil(job) for spoil in spoils]


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Change one of the model's JSON files."""

    def spoil(job: Job) -> None:
        value = json.loads((job.model / name).read_text())
        change(value)
        (job.model / name).write_text(json.dumps(value))

    return spoil


def model_file(name: str, content: bytes | None) -> Spoil:
    """Write one of the model's files, or remove it."""
    return lambda job: (job.model / name).unlink() if content is None else (job.model / name).write_bytes(content)


def cut(name: str, keep: float) -> Spoil:
    """Keep the first part of one of the model's files, as an interrupted download does."""

    def spoil(job: Job) -> None:
        content = (job.model / name).read_bytes()
        (job.model / name).write_bytes(content[: int(len(content) * keep)])

    return spoil


def in_shards(job: Job) -> None:
    """The weights in two files with an index, as large models have them."""
    weights = load_file(job.model / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, job.model / file, metadata={"format": "pt"})
    (job.model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (job.model / "model.safetensors.index.json").write_text(json.dumps(index))


def tokenizer(change: Callable[[Any], Any]) -> Spoil:
    """Change the model's tokenizer."""

    def spoil(job: Job) -> None:
        changed = AutoTokenizer.from_pretrained(job.model)
        change(changed)
        for file in ("chat_template.jinja", "tokenizer_config.json"):
            (job.model / file).unlink(missing_ok=True)
        changed.save_pretrained(job.model)

    return spoil


def set_to(**values: Any) -> Callable[[Any], None]:
    def change(thing: Any) -> None:
        for name, value in values.items():
            thing.__setitem__(name, value) if isinstance(thing, dict) else setattr(thing, name, value)

    return change


def code_in_the_folder(job: Job) -> None:
    """A model that brings its own classes; importing them leaves a file."""
    classes = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    edit_json("config.json", set_to(auto_map=classes, model_type="own"))(job)
    ran = job.folder / "code-ran"
    model_file("own.py", f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n".encode())(job)


def learned_positions(job: Job) -> None:
    """A model that has a table of 64 positions, where others compute them."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "num_labels": 1, "pad_token_id": 0}
    GPT2ForSequenceClassification(GPT2Config(vocab_size=300, **sizes)).save_pretrained(job.model)


def file(name: str, content: bytes) -> Spoil:
    """Another data file instead."""

    def spoil(job: Job) -> None:
        (job.folder / name).parent.mkdir(exist_ok=True)
        (job.folder / name).write_bytes(content)
        job.flags["dataset_name"] = f"{job.folder}/{name}"

    return spoil


def empty_folder(flag: str) -> Spoil:
    return lambda job: ((job.folder / "empty").mkdir(), job.flags.update({flag: "{folder}/empty"}))
