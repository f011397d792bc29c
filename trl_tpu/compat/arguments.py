"""Arguments that transformers has renamed or removed, each with its replacement or other advice."""

import argparse
import os
import warnings
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

import transformers

from ..errors import UserError

_NO_EFFECT = "leave it out, it changes nothing"  # the argument never affected results, or is automatic now
_FEATURE_REMOVED = "gone"  # no replacement exists; sharding of weights is now set by `mesh` and `sharding_plan`


def _repository(args: Any) -> str:
    model = args.push_to_hub_model_id or os.path.basename(str(args.output_dir))
    return f"{args.push_to_hub_organization}/{model}" if args.push_to_hub_organization else model


def _split_batches(args: Any) -> dict[str, Any]:
    config: Any = args.accelerator_config or {}  # in a copy of a config, transformers' class
    return {**(config if isinstance(config, dict) else config.to_dict()), "split_batches": args.split_batches}


#: Arguments that only transformers 4 has. Each entry has the type, the default, and one of these: the current
#: argument, `_FEATURE_REMOVED`, or advice to leave the argument out. The current argument gets the old value. If it
#: needs another value, a fourth item follows: the value, or a function of the config.
REMOVED: dict[str, tuple[Any, ...]] = {
    "evaluation_strategy": (str | None, None, "eval_strategy"),
    "overwrite_output_dir": (bool, False, _NO_EFFECT),
    "per_gpu_train_batch_size": (int | None, None, "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": (int | None, None, "per_device_eval_batch_size"),
    "warmup_ratio": (float | None, None, "warmup_steps", lambda args: args.warmup_steps or args.warmup_ratio),
    "logging_dir": (str | None, None, "TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": (bool, True, "leave it out, since models are saved as safetensors"),
    "no_cuda": (bool, False, "use_cpu"),
    "use_mps_device": (bool, False, _NO_EFFECT),
    "jit_mode_eval": (bool, False, _NO_EFFECT),
    "fp16_opt_level": (str, "O1", _FEATURE_REMOVED),
    "half_precision_backend": (str, "auto", _FEATURE_REMOVED),
    "tpu_num_cores": (int | None, None, _NO_EFFECT),
    "tpu_metrics_debug": (bool, False, "debug", "tpu_metrics_debug"),
    "past_index": (int, -1, _FEATURE_REMOVED),
    "fsdp_min_num_params": (int, 0, _FEATURE_REMOVED),
    "fsdp_transformer_layer_cls_to_wrap": (str | None, None, _FEATURE_REMOVED),
    "adafactor": (bool, False, "optim", "adafactor"),
    "group_by_length": (bool, False, "train_sampling_strategy", "group_by_length"),
    "use_legacy_prediction_loop": (bool, False, _NO_EFFECT),
    "include_inputs_for_metrics": (bool, False, "include_for_metrics", ["inputs"]),
    "fp16_backend": (str, "auto", _FEATURE_REMOVED),
    "push_to_hub_model_id": (str | None, None, "hub_model_id", _repository),
    "push_to_hub_organization": (str | None, None, "hub_model_id", _repository),
    "push_to_hub_token": (str | None, None, "hub_token"),
    "mp_parameters": (str, "", _FEATURE_REMOVED),
    "torchdynamo": (str | None, None, "torch_compile_backend"),
    "ray_scope": (str, "last", _NO_EFFECT),
    "use_ipex": (bool, False, _NO_EFFECT),
    "dispatch_batches": (bool | None, None, _NO_EFFECT),
    "split_batches": (bool | None, None, "accelerator_config", _split_batches),
    "include_tokens_per_second": (bool, False, "include_num_input_tokens_seen", "non_padding"),
}

if TYPE_CHECKING:

    class RemovedArguments:
        """The fields of `REMOVED`, for subclasses of `transformers.TrainingArguments`."""

        evaluation_strategy: str | None
else:
    RemovedArguments = make_dataclass(
        "RemovedArguments",
        [(name, row[0], field(default=row[1], metadata={"help": argparse.SUPPRESS})) for name, row in REMOVED.items()],
    )


def apply_removed_arguments(args: Any) -> None:
    """Set the current arguments from removed ones (`REMOVED`), with a deprecation warning for each.

    Raises:
        UserError: If an argument asks for a feature that no longer exists.
    """
    for name, (_, default, current, *values) in REMOVED.items():
        old_value = getattr(args, name)
        if old_value is None or old_value == default:
            continue
        if current == _FEATURE_REMOVED:
            raise UserError(f"`{name}={old_value}` asks for a feature that only transformers 4 has. Leave it out.")
        value = values[0] if values else old_value
        value = value(args) if callable(value) else value
        if getattr(args, current, None) == value:  # a copy of a config whose value is already applied
            continue
        advice = f"use `{current}={value!r}`"
        if current.startswith("leave it out"):
            advice = current
        elif current == "TENSORBOARD_LOGGING_DIR":
            os.environ[current] = value
            advice = f"set {current} in the environment"
        else:
            setattr(args, current, value)
        advice = "use `hub_token`" if current == "hub_token" else advice  # the token must not be logged
        warnings.warn(f"`{name}` is deprecated: {advice}.", FutureWarning, stacklevel=4)
    args.push_to_hub_token = None  # saved files leave out `hub_token`, but would keep this copy


@dataclass
class TrainingArguments(RemovedArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments` that also accepts the arguments of versions up to 4.57."""

    def __post_init__(self) -> None:
        apply_removed_arguments(self)
        super().__post_init__()
