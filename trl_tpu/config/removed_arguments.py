"""The arguments that `transformers.TrainingArguments` had up to 4.57: taken as what they are called today, or refused.

Scripts and YAML files for older versions of TRL pass them; transformers 5 would not know them.
"""

import argparse
import os
import warnings
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import transformers

from ..errors import UserError

_NEEDLESS = "needless"  # it changed nothing about the result, or was for what is found out today
_GONE = "gone"  # it asked for what there is no more; weights are split by `mesh` and `sharding_plan`


def _removed(default: Any, today: str, value: Any = None) -> Any:
    """Make a field for an argument of then, which ``--help`` does not show.

    Args:
        today: The argument's name today, or `_NEEDLESS` or `_GONE`.
        value: What that one is set to; the same value as was given if None.
    """
    return field(default=default, metadata={"today": (today, value)})


@dataclass
class RemovedArguments:
    """A part of dataclasses that are `transformers.TrainingArguments`, too; `take_removed` begins their init."""

    evaluation_strategy: str | None = _removed(None, "eval_strategy")
    overwrite_output_dir: bool = _removed(False, _NEEDLESS)
    per_gpu_train_batch_size: int | None = _removed(None, "per_device_train_batch_size")
    per_gpu_eval_batch_size: int | None = _removed(None, "per_device_eval_batch_size")
    warmup_ratio: float | None = _removed(None, "warmup_steps")
    logging_dir: str | None = _removed(None, "TENSORBOARD_LOGGING_DIR")
    save_safetensors: bool = _removed(True, _GONE)
    no_cuda: bool = _removed(False, "use_cpu")
    use_mps_device: bool = _removed(False, _NEEDLESS)
    jit_mode_eval: bool = _removed(False, _NEEDLESS)
    fp16_opt_level: str = _removed("O1", _GONE)
    half_precision_backend: str = _removed("auto", _GONE)
    tpu_num_cores: int | None = _removed(None, _NEEDLESS)
    tpu_metrics_debug: bool = _removed(False, "debug", "tpu_metrics_debug")
    past_index: int = _removed(-1, _GONE)
    fsdp_min_num_params: int = _removed(0, _GONE)
    fsdp_transformer_layer_cls_to_wrap: str | None = _removed(None, _GONE)
    adafactor: bool = _removed(False, "optim", "adafactor")
    group_by_length: bool = _removed(False, "train_sampling_strategy", "group_by_length")
    use_legacy_prediction_loop: bool = _removed(False, _NEEDLESS)
    include_inputs_for_metrics: bool = _removed(False, "include_for_metrics", ["inputs"])
    fp16_backend: str = _removed("auto", _GONE)
    push_to_hub_model_id: str | None = _removed(None, "hub_model_id")
    push_to_hub_organization: str | None = _removed(None, "hub_model_id")
    push_to_hub_token: str | None = _removed(None, "hub_token")
    mp_parameters: str = _removed("", _GONE)
    torchdynamo: str | None = _removed(None, "torch_compile_backend")
    ray_scope: str = _removed("last", _NEEDLESS)
    include_tokens_per_second: bool = _removed(False, "include_num_input_tokens_seen", "non_padding")

    def take_removed(self) -> None:
        """Set today's arguments by those that were given and are gone, with a warning for each that names today's.

        Raises:
            UserError: One asked for what there is no more.
        """
        for item in fields(RemovedArguments):
            given = getattr(self, item.name)
            if given is None or given == item.default:
                continue
            today, value = _TODAY[item.name]
            if today == _GONE:
                said = f"`{item.name}={given}`"
                raise UserError(f"{said}: what this argument of transformers 4 asks for is gone. Leave it out.")
            if today == "TENSORBOARD_LOGGING_DIR":
                os.environ[today] = given
                said = f"set {today} in the environment"
            elif today == _NEEDLESS:
                said = "leave it out, it changes nothing"
            else:
                setattr(self, today, self._value_today(item.name, given if value is None else value))
                said = f"use `{today}`" if today == "hub_token" else f"use `{today}={getattr(self, today)!r}`"
            warnings.warn(f"`{item.name}` is deprecated: {said}.", FutureWarning, stacklevel=4)
        self.push_to_hub_token = None  # one place keeps the token, and no file that is saved

    def _value_today(self, name: str, given: Any) -> Any:
        if name == "warmup_ratio":
            return self.warmup_steps or given  # type: ignore[attr-defined,has-type]
        if name.startswith(("push_to_hub_model", "push_to_hub_organ")):
            model = self.push_to_hub_model_id or os.path.basename(str(self.output_dir))  # type: ignore[attr-defined]
            owner = self.push_to_hub_organization
            return f"{owner}/{model}" if owner else model
        return given


_TODAY: dict[str, tuple[str, Any]] = {item.name: item.metadata["today"] for item in fields(RemovedArguments)}
for _item in fields(RemovedArguments):
    _item.metadata = MappingProxyType({"help": argparse.SUPPRESS})  # argparse is given all of it


@dataclass
class TrainingArguments(RemovedArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments`, which also takes the arguments that it had up to 4.57."""

    def __post_init__(self) -> None:
        self.take_removed()
        super().__post_init__()
