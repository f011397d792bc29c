"""Plan a training on TPUs without one: ``trl-tpu plan``.

The arguments of the training itself, from flags or its YAML file, and the slice to plan for. The training step is
traced and given to the TPU's own compiler; see `trl_tpu.plan`.
"""

import argparse
import importlib.util
import os
import sys

from trl_tpu.errors import UserError
from trl_tpu.runtime.device_choice import settle
from trl_tpu.scripts.config_file import take_config


def run(argv: list[str]) -> int:
    """The command ``trl-tpu plan``; returns the exit status."""
    pretend_devices(argv)
    from trl_tpu.scripts import plan_command, plan_request

    asked = plan_request.parse(plan_request.make_parser(), argv)
    try:
        return plan_command.main(asked)
    except RuntimeError as error:  # of the processes that trace and compile, which say what failed
        print(f"trl-tpu plan: error: {error}", file=sys.stderr)
        return 2


def pretend_devices(argv: list[str]) -> None:
    """Let torch_xla have as many virtual devices as the slice has chips: the training's own checks count them.

    They compute nothing. How many there are is settled before torch_xla is imported.

    Raises:
        UserError: torch_xla is not installed, or there is no such slice.
    """
    from trl_tpu.parallel.chips import parse_topology

    if importlib.util.find_spec("torch_xla") is None:
        raise UserError(
            "Planning traces the training step with PyTorch/XLA, which is not installed: its wheels are for Linux on "
            "x86-64. There: pip install 'trl-tpu[tpu]'."
        )
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--topology")
    values, words = take_config(argv)
    topology = finder.parse_known_args(words)[0].topology or values.get("topology")
    chips = parse_topology(topology).chips if topology else 1  # where none is named, the parser will say so
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "USE_TORCH_XLA": "1"}
    settle()


if __name__ == "__main__":
    from trl_tpu.cli import main as command

    raise SystemExit(command(["plan", *sys.argv[1:]]))
