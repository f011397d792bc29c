"""The command ``trl-tpu``. Its ``--help`` does not import torch."""

import argparse
import importlib
import os
import platform
import signal
import sys
import traceback

from trl_tpu.errors import UserError
from trl_tpu.plan.compile import pretend_devices
from trl_tpu.runtime.device_choice import settle
from trl_tpu.scripts.config_file import take_config

COMMANDS = {
    "reward": "train a reward model on preference pairs",
    "prm": "train a process reward model on solutions with labeled steps",
    "plan": "compile a training run for a TPU without having one: does it fit, and how fast can it be",
    "score": "score texts, conversations or pairs with a saved reward model",
    "report": "write a page with a model's verdict and training, in numbers and figures",
    "export": "write a checkpoint's model as safetensors",
    "selfcheck": "check this machine: train a tiny model on its devices and compare with the CPU",
    "env": "print the versions and the runtime, for bug reports",
}
_COMMANDS_WITHOUT_CONFIG = ("export", "report", "selfcheck")


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments after ``trl-tpu``; ``sys.argv[1:]`` when None.

    Returns:
        The exit status: 0 for success. Rejected arguments, files, data or models end the process with status 2 and a
        one-line reason. Unexpected errors give a traceback and status 1.
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
    if command in ("reward", "prm"):  # SIGTERM stays blocked until the command has installed its handler
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        # modules imported below read the environment, so export the `env` of the config file first
        config, words = ({}, words) if command in _COMMANDS_WITHOUT_CONFIG else take_config(words)
        if command == "plan":
            pretend_devices(config, words)
        # a file would keep each update of a bar; the first name also turns off transformers' bars, on import
        bars = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
        for name in () if sys.stderr.isatty() else bars:
            os.environ.setdefault(name, "1")
        settle()
        script = importlib.import_module(f"trl_tpu.scripts.{'reward' if command == 'prm' else command}")
        run = script.run_prm if command == "prm" else script.run
        return run(words) if command in _COMMANDS_WITHOUT_CONFIG else run(words, config)
    except UserError as error:
        # errors of data loader workers begin with a traceback; keep only the text after the error's name
        message = str(error).rpartition(f"{type(error).__name__}: ")[2].strip()
        parser.exit(2, f"\ntrl-tpu {command}: error: {message}\n")  # the first newline ends a progress bar's line
    except (ValueError, ImportError) as error:
        if not _rejects_arguments(error):
            raise
        parser.exit(2, f"\ntrl-tpu {command}: error: {' '.join(str(error).split())}\n")
    except FloatingPointError as error:  # training stopped itself; the message says where and why
        parser.exit(1, f"\ntrl-tpu {command}: error: {error}\n")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _rejects_arguments(error: Exception) -> bool:
    """Return whether an error comes from a library that this package called with arguments, and not from a model."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = max((place for place, name in enumerate(names) if name.startswith("trl_tpu.")), default=0)
    called = names[ours + 1 :]
    is_library = called[:1] and called[0].startswith(("transformers.", "accelerate.", "torch.optim."))
    return bool(is_library) and not any(name.startswith(("transformers.models.", "torch.nn.")) for name in called)


def print_env() -> None:
    """Print the versions of Python and the packages, and the chosen runtime with its reason, one per line."""
    from trl_tpu import runtime
    from trl_tpu.scripts.selfcheck import package_versions

    lines = [f"python: {platform.python_version()} ({platform.platform()})"]
    lines += [f"{package}: {version or 'not installed'}" for package, version in package_versions().items()]
    choice = runtime.choice()
    print("\n".join([*lines, f"runtime: {choice.name} ({choice.reason})"]))


if __name__ == "__main__":
    raise SystemExit(main())
