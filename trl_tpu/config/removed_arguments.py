"""The arguments that `transformers.TrainingArguments` had up to 4.57: taken as what they are called today, or refused.

Scripts and YAML files for older versions of TRL pass them; transformers 5 would not know them.
"""

import argparse
import os
import warnings
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import transformers

from ..errors import UserError

#: Arguments that are called otherwise today, with the value that their own becomes.
_RENAMED: dict[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
    "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
}
#: Arguments of which one value is another argument's today.
_IS_NOW: dict[str, tuple[str, Any]] = {
    "adafactor": ("optim", "adafactor"),
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", ["inputs"]),
    "include_tokens_per_second": ("include_num_input_tokens_seen", "non_padding"),
    "tpu_metrics_debug": ("debug", "tpu_metrics_debug"),
}
#: Arguments that changed nothing about the result, or were for what is found out today.
_NEEDLESS = {
    *("overwrite_output_dir", "use_mps_device", "jit_mode_eval", "use_legacy_prediction_loop", "tpu_num_cores"),
    "ray_scope",
}
#: Arguments that asked for what is gone; weights are split by `mesh` and `sharding_plan` today.
_GONE = {
    *("past_index", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "mp_parameters"),
    *("fp16_opt_level", "fp16_backend", "half_precision_backend"),
}


@dataclass
class RemovedArguments:
    """A part of dataclasses that are `transformers.TrainingArguments`, too; `take_removed` comes first in their init.

    On a command line they are flags that `--help` does not show.
    """

    evaluation_strategy: str | None = None
    overwrite_output_dir: bool = False
    per_gpu_train_batch_size: int | None = None
    per_gpu_eval_batch_size: int | None = None
    warmup_ratio: float | None = None
    logging_dir: str | None = None
    save_safetensors: bool = True
    no_cuda: bool = False
    use_mps_device: bool = False
    jit_mode_eval: bool = False
    fp16_opt_level: str = "O1"
    half_precision_backend: str = "auto"
    tpu_num_cores: int | None = None
    tpu_metrics_debug: bool = False
    past_index: int = -1
    fsdp_min_num_params: int = 0
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    adafactor: bool = False
    group_by_length: bool = False
    use_legacy_prediction_loop: bool = False
    include_inputs_for_metrics: bool = False
    fp16_backend: str = "auto"
    push_to_hub_model_id: str | None = None
    push_to_hub_organization: str | None = None
    push_to_hub_token: str | None = None
    mp_parameters: str = ""
    torchdynamo: str | None = None
    ray_scope: str = "last"
    include_tokens_per_second: bool = False

    def take_removed(self) -> None:
        """Set today's arguments by those that were given and are gone, with a warning for each that names today's.

        Raises:
            UserError: One asked for what there is no more.
        """
        given = {
            item.name: value
            for item in fields(RemovedArguments)
            if (value := getattr(self, item.name)) != item.default and value is not None
        }
        for name, value in given.items():
            if name in _GONE:
                raise UserError(
                    f"`{name}={value}`: what this argument of transformers 4 asked for is gone. Leave it out."
                )
            _warn(name, self._take(name, value))

    def _take(self, name: str, value: Any) -> str:
        """Do what an argument asked for, and return how it is said today."""
        if name in _NEEDLESS:
            return "leave it out, it changes nothing"
        if name == "save_safetensors":
            raise UserError("`save_safetensors=False`: weights are saved as safetensors, always. Leave it out.")
        if name == "logging_dir":
            os.environ["TENSORBOARD_LOGGING_DIR"] = value
            return "set TENSORBOARD_LOGGING_DIR in the environment"
        if name in ("push_to_hub_model_id", "push_to_hub_organization"):
            model = self.push_to_hub_model_id or os.path.basename(str(self.output_dir))  # type: ignore[attr-defined]
            owner = self.push_to_hub_organization
            today = "hub_model_id", f"{owner}/{model}" if owner else model
        elif name == "warmup_ratio":
            today = "warmup_steps", self.warmup_steps or value  # type: ignore[attr-defined,has-type]
        elif name in _IS_NOW:
            today = _IS_NOW[name]
        else:
            today = _RENAMED[name], value
        setattr(self, *today)
        self.push_to_hub_token = None  # one place keeps the token, and no file that is saved
        return f"use `{today[0]}`" if today[0] == "hub_token" else f"use `{today[0]}={today[1]!r}`"


def _warn(name: str, today: str) -> None:
    warnings.warn(f"`{name}` is deprecated: {today}.", FutureWarning, stacklevel=5)


for _item in fields(RemovedArguments):
    _item.metadata = MappingProxyType({"help": argparse.SUPPRESS})


@dataclass
class TrainingArguments(RemovedArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments`, which also takes the arguments that it had up to 4.57."""

    def __post_init__(self) -> None:
        self.take_removed()
        super().__post_init__()
