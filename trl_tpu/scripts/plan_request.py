"""What ``trl-tpu plan`` is asked: the arguments of the training itself, and the slice to plan for."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.scripts.config_file import take_config
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl_tpu.trainer.model_config import ModelConfig

# what `remat` says already, see `RewardConfig`
_DECIDED_BY_REMAT = {"gradient_checkpointing", "activation_checkpointing"}


@dataclass
class PlanArguments:
    """What to plan for, beside the arguments of the training."""

    topology: str = field(metadata={"help": "The slice: chip and shape, such as v5e:2x4, v5p:2x2x4 or v6e:4x4."})
    rows: int | None = field(
        default=None,
        metadata={"help": "Packed rows of a batch, over all chips. By default as many as pairs of `max_length` need."},
    )
    pairs_in_dataset: int | None = field(
        default=None, metadata={"help": "Pairs to train on, for the hours. By default those of the dataset, if named."}
    )
    price_per_chip_hour: float | None = field(
        default=None, metadata={"help": "What an hour of a chip costs you, in any currency, for the cost."}
    )
    search: bool = field(
        default=False, metadata={"help": "Look for the best mesh, remat policy and batch size for the slice."}
    )
    compiles: int = field(
        default=6, metadata={"help": "How many programs a search, or a way that does not fit, may compile."}
    )
    all_layers: bool = field(
        default=False,
        metadata={"help": "Compile all layers of a deep model, which takes long, and not two depths of it."},
    )
    json: bool = field(default=False, metadata={"help": "Print JSON: bytes, operations and seconds."})


@dataclass(frozen=True)
class PlanRequest:
    """The parsed arguments; ``words`` are those of `RewardConfig` as they were given, before it has read them."""

    plan: PlanArguments
    script: ScriptArguments
    training: RewardConfig
    model: ModelConfig
    data: DatasetMixtureConfig
    words: dict[str, Any]


def make_parser() -> TrlParser:
    """The parser: the flags of ``trl-tpu reward`` and those of planning."""
    types = (PlanArguments, ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig)
    return TrlParser(types, prog="trl-tpu plan")


def parse(parser: TrlParser, argv: list[str]) -> PlanRequest:
    """The arguments, checked as the training would, for as many devices as the slice has chips.

    Raises:
        UserError: Unknown arguments, and what the training itself would refuse.
    """
    plan, script, training, model, data = parser.parse_args_and_config(argv)
    words = parser.parse_known_args(take_config(argv)[1])[0]
    names = [
        each.name for each in dataclasses.fields(RewardConfig) if each.init and each.name not in _DECIDED_BY_REMAT
    ]
    return PlanRequest(plan, script, training, model, data, {name: getattr(words, name) for name in names})
