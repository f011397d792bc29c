"""The command ``trl-tpu``. Asking it for help imports no torch."""

import argparse
import importlib
import importlib.metadata
import platform
import signal
import sys

from trl_tpu.errors import UserError
from trl_tpu.plan.compile import pretend_devices
from trl_tpu.runtime.device_choice import settle
from trl_tpu.scripts.config_file import take_config

COMMANDS = {
    "reward": "train a reward model on preference pairs",
    "prm": "train a process reward model on solutions whose steps are judged",
    "plan": "compile the training for a TPU that you have not rented: does it fit, how fast can it be",
    "score": "score texts, conversations or pairs with a saved reward model",
    "report": "a model's verdict and training, in numbers and pictures on a page",
    "export": "write a checkpoint's model as safetensors",
    "env": "print the versions and the runtime, for a bug report",
}
_PACKAGES = (
    "torch",
    "torch_xla",
    "torch_tpu",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "safetensors",
    "trl_tpu",
)
_WITHOUT_CONFIG = ("export", "report")


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The words after the command's name; ``sys.argv[1:]`` when None.

    Returns:
        The exit status: 0 for success. Words, files, data or models that are refused end the process with status 2
        and one line that says why; anything unforeseen is a traceback and status 1.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="trl-tpu", description="Reward models on TPUs.", allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        subparsers.add_parser(name, help=help_text, add_help=False)
    command, words = parser.parse_args(argv[:1]).command, argv[1:]
    if command is None:
        parser.print_help()
        return 0
    if command == "env":
        argparse.ArgumentParser(prog="trl-tpu env", description=COMMANDS["env"]).parse_args(words)
        print_env()
        return 0
    if command in ("reward", "prm"):  # which handles what has come by then once it knows its folder
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        # the file's `env` must be there before anything below is imported
        config, words = ({}, words) if command in _WITHOUT_CONFIG else take_config(words)
        if command == "plan":
            pretend_devices(config, words)
        settle()
        script = importlib.import_module(f"trl_tpu.scripts.{'reward' if command == 'prm' else command}")
        run = script.run_prm if command == "prm" else script.run
        return run(words) if command in _WITHOUT_CONFIG else run(words, config)
    except UserError as error:
        # a worker process of a data loader puts its traceback before what the error says
        message = str(error).rpartition(f"{type(error).__name__}: ")[2].strip()
        parser.exit(2, f"\ntrl-tpu {command}: error: {message}\n")  # a progress bar may be open in its line
    except FloatingPointError as error:  # training has stopped itself, and says where and why
        parser.exit(1, f"\ntrl-tpu {command}: error: {error}\n")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def print_env() -> None:
    """Print the versions of Python and of the packages, and which runtime trains and why, a line each."""
    lines = [f"python: {platform.python_version()} ({platform.platform()})"]
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"{package}: {version}")
    from trl_tpu import runtime

    choice = runtime.choice()
    print("\n".join([*lines, f"runtime: {choice.name} ({choice.reason})"]))


if __name__ == "__main__":
    raise SystemExit(main())
