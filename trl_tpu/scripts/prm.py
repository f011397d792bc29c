"""Train a process reward model: ``trl-tpu prm``, as ``trl-tpu reward``, with the flags of a `PRMConfig`."""

from trl_tpu.experimental.prm import PRMConfig
from trl_tpu.scripts import reward
from trl_tpu.scripts.parser import TrlParser


def make_parser() -> TrlParser:
    """Make the parser of the command's flags."""
    parser = reward.make_parser(prog="trl-tpu prm", config=PRMConfig)
    parser.set_defaults(lora_task_type="TOKEN_CLS")
    return parser


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu prm``; returns the exit status."""
    return reward.run(argv, make_parser())
