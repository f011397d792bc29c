"""Arguments that transformers, TRL or EasyDeL have renamed or removed, each with its replacement or other advice."""

import argparse
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import transformers

from ..errors import UserError, UserTypeError

T = TypeVar("T")

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
    **dict.fromkeys(("overwrite_output_dir", "use_legacy_prediction_loop"), (bool, False, _NO_EFFECT)),
    **dict.fromkeys(("use_mps_device", "use_ipex", "jit_mode_eval"), (bool, False, _NO_EFFECT)),
    "per_gpu_train_batch_size": (int | None, None, "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": (int | None, None, "per_device_eval_batch_size"),
    "warmup_ratio": (float | None, None, "warmup_steps", lambda args: args.warmup_steps or args.warmup_ratio),
    "logging_dir": (str | None, None, "TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": (bool, True, "leave it out, since models are saved as safetensors"),
    "no_cuda": (bool, False, "use_cpu"),
    "fp16_opt_level": (str, "O1", _FEATURE_REMOVED),
    **dict.fromkeys(("half_precision_backend", "fp16_backend"), (str, "auto", _FEATURE_REMOVED)),
    "tpu_num_cores": (int | None, None, _NO_EFFECT),
    "tpu_metrics_debug": (bool, False, "debug", "tpu_metrics_debug"),
    "past_index": (int, -1, _FEATURE_REMOVED),
    "fsdp_min_num_params": (int, 0, _FEATURE_REMOVED),
    "fsdp_transformer_layer_cls_to_wrap": (str | None, None, _FEATURE_REMOVED),
    "adafactor": (bool, False, "optim", "adafactor"),
    "group_by_length": (bool, False, "train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": (bool, False, "include_for_metrics", ["inputs"]),
    "push_to_hub_model_id": (str | None, None, "hub_model_id", _repository),
    "push_to_hub_organization": (str | None, None, "hub_model_id", _repository),
    "push_to_hub_token": (str | None, None, "hub_token"),
    "mp_parameters": (str, "", _FEATURE_REMOVED),
    "torchdynamo": (str | None, None, "torch_compile_backend"),
    "ray_scope": (str, "last", _NO_EFFECT),
    "dispatch_batches": (bool | None, None, _NO_EFFECT),
    "split_batches": (bool | None, None, "accelerator_config", _split_batches),
    "include_tokens_per_second": (bool, False, "include_num_input_tokens_seen", "non_padding"),
}
_JAX_ONLY = "leave it out, since it is for JAX"
#: Patterns of argument names of EasyDeL and older TRL versions, each with the current name or other advice.
OLD_NAMES = {
    "arguments": "args",
    "max_sequence_length|seq_length": "max_length",
    "save_directory": "output_dir",
    "repo_id": "model_name_or_path",
    "model_name": "run_name for the run, model_name_or_path for the model",
    "trainer_prefix|wandb_name": "run_name",
    "processor_repo_id|tokenizer_name": "leave it out, since the model's own tokenizer is loaded",
    "dataset_split|train_subset": "dataset_train_split",
    "eval_split|eval_subset": "dataset_test_split",
    "dataset_text_field|ids_to_pop_from_dataset": "leave it out, since unknown columns are ignored",
    "use_wandb": "report_to=wandb",
    "log_with|report_metrics": "report_to",
    "wandb_entity": "set WANDB_ENTITY in the environment",
    "log_steps|report_steps": "logging_steps",
    "progress_bar_type": "progress",
    "metrics_to_show_in_rich_pbar": "disable_tqdm",
    "verbose": "log_level",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "scheduler|learning_rate_fn": "lr_scheduler_type",
    "custom_scheduler": "lr_scheduler_kwargs",
    "optimizer": "optim",
    "extra_optimizer_kwargs": "optimizer_cls_and_kwargs of the trainer",
    "tx_mu_dtype": "optim_state_dtype",
    "clip_grad": "max_grad_norm",
    "loss_config": "nonfinite_limit",
    "max_training_steps|per_epoch_training_steps": "max_steps",
    "max_evaluation_steps|per_epoch_evaluation_steps": "max_eval_steps",
    "evaluation_steps": "eval_steps",
    "eval_first_step": "eval_on_start",
    "do_last_save": "leave it out, since the command saves at its end; a script calls trainer.save_model()",
    "save_optimizer_state": "save_only_model (the opposite)",
    "save_tpu_preemption_checkpoints": "leave it out, since a SIGTERM always saves a checkpoint",
    "merge_lora_before.*save": "trl-tpu export --merge",
    "resume_if_possible": "resume_from_checkpoint=auto",
    "(force_)?step_start_point": "resume_from_checkpoint",
    "remove_ckpt_after_load": "leave it out, since the checkpoint that a run started from is kept",
    "shuffle_train_dataset": "train_sampling_strategy",
    "shuffle_seed_train": "data_seed",
    "(step_)?partition_spec|auto_shard_states|sharding_axis": "mesh",
    "attn_mechanism": "attn_implementation",
    "param_dtype": "dtype",
    "attn_(softmax_)?dtype": "leave it out, since bf16 decides the type of attention",
    "backend": "use_cpu, or PJRT_DEVICE and USE_TORCH_XLA in the environment",
    "use_data_collac?tor": "data_collator of the trainer",
    "watchers|weight_distribution_.*": "callbacks of the trainer",
    "track_memory": "trl-tpu plan",
    "log_all_workers|process_zero_is_admin": "leave it out, since process 0 logs and writes",
    "performance_mode": "leave it out, since values are read from devices only for logs",
    "use_grain|grain_.*|offload_d.*": "leave it out, since data stays on disk, and each host reads its part",
    "benchmark.*": "trl-tpu score and trl-tpu report",
    "(log_training_)?generation.*|(use_)?esurge_.*": "leave it out, since a reward model generates no text",
    "lmhead_chunksize|train_on_inputs|aux_loss_enabled": "leave it out, since it is for language models",
    "quantization_.*|.*straight_through.*": "leave it out, or set load_in_4bit for a frozen base model on a GPU",
    "pruning_module|spars.*_module.*": "leave it out, since weights are not pruned",
    "jax_distributed_config|init_tx|low_mem_usage|is_fine_tuning|use_cjit": _JAX_ONLY,
    "model_parameters|state_apply_fn_kwarguments_to_model|_can_log.*|_im_a_hidden.*": _JAX_ONLY,
}


def advice_on_old_names(names: Iterable[str]) -> str:
    """Return advice on each argument that matches `OLD_NAMES`: its current name, or another remedy.

    Args:
        names: Names of arguments, or flags such as ``--old_name=value``.

    Returns:
        The advice, separated by semicolons. Empty if no name matches.
    """
    advice = []
    for name in (text.partition("=")[0] for text in names):
        bare = name.lstrip("-").replace("-", "_")
        current = next((current for old, current in OLD_NAMES.items() if re.fullmatch(old, bare)), None)
        if current is not None:
            is_setting = re.fullmatch(r"[a-z_]+(=\w+)?", current)
            dashes = "--" if name.startswith("--") and is_setting else ""
            advice.append(f"{name}: {'' if current.startswith(('leave', 'set')) else 'use '}{dashes}{current}")
    return "; ".join(advice)


def suggests_new_names(function: Callable[..., T]) -> Callable[..., T]:
    """Let a function or class reject unknown keyword arguments with advice from `OLD_NAMES`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        reject_old_names(function, kwargs)
        return function(*args, **kwargs)

    return call


def reject_old_names(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise UserTypeError with the advice of `OLD_NAMES` on names that are no parameters of a function or class."""
    parameters = inspect.signature(function).parameters
    unknown = [name for name in names if name not in parameters]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown and not takes_all and (advice := advice_on_old_names(unknown)):
        raise UserTypeError(f"{function.__name__} got unknown arguments. {advice}.")


class SuggestsNewNames:
    """Base class that rejects unknown constructor arguments with advice from `OLD_NAMES`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        reject_old_names(cls, kwargs)
        return super().__new__(cls)


class RemovedArguments(SuggestsNewNames):
    """The fields of `REMOVED`, for subclasses of `transformers.TrainingArguments`."""


if not TYPE_CHECKING:  # mypy rejects dynamic base classes
    RemovedArguments = make_dataclass(
        "RemovedArguments",
        [(name, row[0], field(default=row[1], metadata={"help": argparse.SUPPRESS})) for name, row in REMOVED.items()],
        bases=(RemovedArguments,),
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
        if current.startswith("leave it out"):
            advice = current
        elif current == "TENSORBOARD_LOGGING_DIR":
            os.environ[current] = value
            advice = f"set {current} in the environment"
        else:
            setattr(args, current, value)
            advice = "use `hub_token`" if current == "hub_token" else f"use `{current}={value!r}`"  # a token is secret
        warnings.warn(f"`{name}` is deprecated: {advice}.", FutureWarning, stacklevel=4)
    args.push_to_hub_token = None  # saved files leave out `hub_token`, but would keep this copy


@dataclass
class TrainingArguments(RemovedArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments` that also accepts the arguments of versions up to 4.57."""

    def __post_init__(self) -> None:
        apply_removed_arguments(self)
        super().__post_init__()
