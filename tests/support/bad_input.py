"""A training command that works, for tests to spoil."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tiny import tiny_model, tiny_tokenizer

PAIR = {"prompt": "Count on from 1:", "chosen": " 2 3 4", "rejected": " 4 2"}
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
        named = {name: text.replace("{folder}", str(self.folder)) for name, text in self.flags.items()}
        return [word for name, text in named.items() for word in (f"--{name}", text)]

    def write_pairs(self, *rows: dict[str, object]) -> None:
        self.pairs.write_text("\n".join(map(json.dumps, rows)))
