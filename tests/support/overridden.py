"""List the overridden methods of a trainer that a run calls: `python overridden.py PACKAGE FOLDER`.

If the environment names a Hub, the run pushes to it.
"""

import importlib
import inspect
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import tiny
from environment import EXAMPLES
from training import QUIET
from transformers import Trainer

PAIRS = tiny.made_up_pairs(24)
TOKENIZER = tiny.tiny_tokenizer(PAIRS)
SETTINGS = QUIET | {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "optim": "adamw_torch"}
SETTINGS |= {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
SETTINGS |= {"load_best_model_at_end": True}


def overriding(base: type, mark: Callable[[str, bool], None]) -> type:
    """Return a subclass that overrides every method by one that calls ``mark`` and the method of ``base``.

    ``mark`` receives the method's name and whether an argument is a batch. Overrides of transformers' methods accept
    only transformers' arguments.
    """

    def override(name: str, is_static: bool) -> Any:
        taken = inspect.signature(getattr(Trainer, name, lambda *args, **kwargs: None))

        def marked(*args: Any, **kwargs: Any) -> Any:
            taken.bind(*args, **kwargs)
            given = [*args, *kwargs.values()]
            given += [item for each in given if isinstance(each, list) for item in each]
            mark(name, any(isinstance(each, dict) and "input_ids" in each for each in given))
            return getattr(base, name)(*args, **kwargs)

        return staticmethod(marked) if is_static else marked

    methods = {name: inspect.getattr_static(base, name) for name in dir(base) if not name.startswith("__")}
    own = {
        name: override(name, isinstance(method, staticmethod))
        for name, method in methods.items()
        if isinstance(method, FunctionType | staticmethod)
    }
    return type("Overriding", (base,), own)


def run(package: Any, folder: Path, **settings: Any) -> dict[str, Any]:
    """Return the methods called in each phase of a complete run, the methods that read batches, and the losses."""
    called: dict[str, set[str]] = defaultdict(set)
    reading: set[str] = set()
    part = "constructor"

    def mark(name: str, reads: bool) -> None:
        called[part].add(name)
        if reads:
            reading.add(name)

    trainer_class = overriding(package.RewardTrainer, mark)

    def trainer() -> Any:
        args = package.RewardConfig(str(folder), **SETTINGS | settings)
        data = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": TOKENIZER}
        return trainer_class(tiny.tiny_model(TOKENIZER), args, **data)

    first, resumed = trainer(), trainer()
    acts: dict[str, Callable[[], Any]] = {
        "train": first.train,
        "resume": lambda: resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2")),
        "evaluate": resumed.evaluate,
        "predict": lambda: resumed.predict(resumed.eval_dataset),
        "save_model": resumed.save_model,
        **({"push_to_hub": resumed.push_to_hub} if settings.get("push_to_hub") else {}),
    }
    for part, act in acts.items():  # noqa: B007  # `mark` reads it
        act()
    logs = [*first.state.log_history, *resumed.state.log_history]
    losses = [log[key] for log in logs for key in ("loss", "eval_loss") if key in log]
    return {"called": {part: [*names] for part, names in called.items()}, "reading": [*reading], "losses": losses}


def not_called(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    """Return the methods called in a phase with TRL's trainer, but not in that phase with this package's."""
    return {name for part, names in theirs["called"].items() for name in {*names} - {*ours["called"].get(part, ())}}


def listed() -> set[str]:
    """Return the methods that a guide lists as not called."""
    guide = (EXAMPLES / "guides" / "differences_from_trl.md").read_text(encoding="utf-8")
    table = guide.partition("## Overrides that are not called")[2].partition("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}


if __name__ == "__main__":
    package, folder = sys.argv[1:]
    own = {"use_cpu": True} if package == "trl" else {}
    if "HF_ENDPOINT" in os.environ:
        own |= {"push_to_hub": True, "hub_model_id": "user/overridden", "hub_token": "x"}
    print(json.dumps(run(importlib.import_module(package), Path(folder), **own)))
