"""The command ``trl-tpu``. Asking it for help imports no torch."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import sys
import traceback

from trl_tpu.runtime.device_choice import settle
from trl_tpu.scripts.config_file import take_config

COMMANDS = {
    "reward": "train a reward model on preference pairs",
    "plan": "compile the training for a TPU that you have not rented: does it fit, how fast can it be",
    "score": "score texts, conversations or pairs with a saved reward model",
    "export": "write a checkpoint's model as safetensors, and push it to the Hub",
    "env": "print the versions and the runtime, for a bug report",
}
PACKAGES = ("torch", "torch_xla", "transformers", "accelerate", "datasets", "peft", "safetensors", "trl_tpu")


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The words after the command's name; ``sys.argv[1:]`` when None.

    Returns:
        The exit status: 0 for success. Words, files, data or models that are refused end the process with status 2
        and one line that says why; anything unforeseen is a traceback and status 1.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="trl-tpu", description="Reward models on TPUs.", allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        subparsers.add_parser(name, help=help_text, add_help=False)
    command = parser.parse_args(argv[:1]).command
    if command is None:
        parser.print_help()
        return 0
    words = argv[1:]
    if command == "env":
        argparse.ArgumentParser(prog="trl-tpu env", description=COMMANDS["env"]).parse_args(words)
        print(environment())
        return 0
    try:
        take_config(words)  # for its `env`, which must be there before anything below is imported
        settle()
    except (OSError, ValueError) as error:
        parser.exit(2, f"trl-tpu {command}: error: {error}\n")
    try:
        return importlib.import_module(f"trl_tpu.scripts.{command}").run(words)
    except (ImportError, OSError, TypeError, ValueError) as error:
        if not _refuses(error):
            raise
        parser.exit(2, f"\ntrl-tpu {command}: error: {error}\n")  # a progress bar may be open in its line
    except FloatingPointError as error:  # training has stopped itself, and says where and why
        parser.exit(1, f"\ntrl-tpu {command}: error: {error}\n")


def _refuses(error: Exception) -> bool:
    """Whether the error is a `raise` statement of this package: what it says is then all that a user needs.

    A fault of the package or of a library keeps its traceback.
    """
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    if type(error.__cause__).__name__ == "RemoteTraceback":  # raised in a worker process: its traceback is text
        places = re.findall(r'^ +File "(.+?)", line .*\n +(.*)', str(error.__cause__), re.MULTILINE)
        file, statement = places[-1] if places else ("", "")
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        file, statement = place.filename, place.line or ""
    return file.startswith(package) and statement.startswith("raise")


def environment() -> str:
    """Versions of Python and of the packages, and which runtime trains and why, a line each."""
    lines = [f"python: {platform.python_version()} ({platform.platform()})"]
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"{package}: {version}")
    from trl_tpu import runtime  # imports torch

    choice = runtime.choice()
    return "\n".join([*lines, f"runtime: {choice.name} ({choice.reason})"])


if __name__ == "__main__":
    raise SystemExit(main())
