"""Run a script for TRL as it is: ``trl-tpu run script.py [its arguments]``.

What `trl` has for rewards comes from this package, everything else from the installed TRL, if there is one.
"""

import argparse
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import trl_tpu
from trl_tpu.errors import UserFileError
from trl_tpu.old_paths import OldPaths

#: Modules of TRL in whose place are ours; of others TRL's stay, also where we have one of that name.
OURS = ("trainer.model_config", "trainer.reward_config", "trainer.reward_trainer")


class Aliases(MetaPathFinder):
    """Finds ``trl`` and what is below it in this package, where no TRL is installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "trl":
            return None
        try:
            sys.modules[name] = importlib.import_module(name.replace("trl", "trl_tpu", 1))
        except ModuleNotFoundError:
            return None
        return sys.modules[name].__spec__


def be_trl() -> None:
    """From here on, let ``import trl`` and its like give what this package has for rewards."""
    ours = {name: getattr(trl_tpu, name) for name in trl_tpu.__all__ if not name.startswith("__")}
    # as scripts of then gave it; looked up, since transformers puts another module in its own place
    setattr(importlib.import_module("transformers"), "TrainingArguments", ours["TrainingArguments"])  # noqa: B010
    if importlib.util.find_spec("trl") is None:
        sys.meta_path.insert(0, Aliases())
        return
    for package in ("trl", "trl.trainer"):
        module = importlib.import_module(package)
        for name, value in ours.items():
            setattr(module, name, value)
    for path in OURS:
        sys.modules[f"trl.{path}"] = importlib.import_module(f"trl_tpu.{path}")
    sys.meta_path.append(OldPaths("trl"))  # after Python's own finders: for what TRL itself has no more


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's words, all but the first of which are the script's."""
    parser = argparse.ArgumentParser(prog="trl-tpu run", description=__doc__)
    parser.add_argument("script", help="a Python file that imports trl")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


def run(words: list[str]) -> int:
    """Run the script that the first word names, with the others as its arguments.

    Raises:
        UserFileError: There is no such file.
    """
    asked = make_parser().parse_args(words)
    if not Path(asked.script).is_file():
        raise UserFileError(f"There is no script {asked.script}. Name a Python file.")
    be_trl()
    sys.argv = [asked.script, *asked.arguments]
    sys.path.insert(0, str(Path(asked.script).resolve().parent))
    runpy.run_path(asked.script, run_name="__main__")
    return 0
