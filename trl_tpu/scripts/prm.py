"""Train a process reward model: ``trl-tpu prm``, as ``trl-tpu reward``, with the flags of a `PRMConfig`."""

from collections.abc import Mapping
from typing import Any

from trl_tpu.experimental.prm import PRMConfig
from trl_tpu.scripts import reward
from trl_tpu.scripts.parser import TrlParser


def make_parser() -> TrlParser:
    """Make the parser of the command's flags."""
    return reward.make_parser("trl-tpu prm", PRMConfig)


def run(argv: list[str], config: Mapping[str, Any] | None = None) -> int:
    """Run the command ``trl-tpu prm``; returns the exit status. See `take_config` for the arguments."""
    return reward.run(argv, config, make_parser())
