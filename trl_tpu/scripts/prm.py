"""Train a process reward model: ``trl-tpu prm``, as ``trl-tpu reward``, with the flags of a `PRMConfig`."""

from trl_tpu.experimental.prm import PRMConfig
from trl_tpu.scripts import reward
from trl_tpu.scripts.parser import TrlParser


def make_parser() -> TrlParser:
    """Make the parser of the command's flags."""
    return reward.make_parser(prog="trl-tpu prm", config=PRMConfig)


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu prm``; returns the exit status."""
    return reward.run(argv, make_parser())
