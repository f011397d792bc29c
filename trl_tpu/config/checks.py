"""Checks of settings, and replacements for arguments that transformers, TRL or EasyDeL have renamed or removed."""

import argparse
import contextlib
import functools
import inspect
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import transformers
from transformers.integrations.integration_utils import get_available_reporting_integrations, is_flytekit_available

from .. import runtime
from ..errors import UserError, UserTypeError, explaining
from ..runtime import Remat

logger = logging.getLogger(__name__)

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
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_all and (advice := advice_on_old_names(name for name in names if name not in parameters)):
        raise UserTypeError(f"{function.__name__} got unknown arguments. {advice}.")


class SuggestsNewNames:
    """Base class that rejects unknown constructor arguments with advice from `OLD_NAMES`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        reject_old_names(cls, kwargs)
        return super().__new__(cls)


if TYPE_CHECKING:

    class RemovedArguments(SuggestsNewNames):
        """The fields of `REMOVED`, for subclasses of `transformers.TrainingArguments`."""

        evaluation_strategy: str | None
else:
    RemovedArguments = make_dataclass(
        "RemovedArguments",
        [(name, row[0], field(default=row[1], metadata={"help": argparse.SUPPRESS})) for name, row in REMOVED.items()],
        bases=(SuggestsNewNames,),
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


_PLAIN_TORCH = "train on plain torch with USE_TORCH_XLA=0"

#: Settings that no runtime supports, with advice. A key is NAME, or NAME=PATTERN with a regular expression to find in
#: the value.
LIMITS = {
    "include_for_metrics=inputs": "leave it out, and take inputs from the evaluation data: predictions have its order",
    "save_steps=None": "leave it out, or set save_strategy='no'",
    "eval_do_concat_batches=False": "leave it out: compute_metrics receives one array of all pairs",
    r"optim_args=^(?!None$|[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*$)": "write name=value, with commas between several",
}
#: Settings that XLA does not support, in the form of `LIMITS`.
XLA_LIMITS = {
    "fsdp": "shard with mesh='fsdp=-1' (transformers' FSDP wrapper for XLA saves broken files)",
    "deepspeed": "shard with mesh='fsdp=-1' (ZeRO-3 without DeepSpeed)",
    "parallelism_config": "arrange the devices with mesh",
    "use_liger_kernel": "leave it out: its Triton kernels are for GPUs, and XLA fuses operations automatically",
    "auto_find_batch_size": "set per_device_train_batch_size: every size that it tries needs another compilation",
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), "leave it out: XLA always compiles"
    ),
    "fp16": "use bf16=True: XLA devices have no float16 loss scaling",
    "fp16_full_eval": "leave it out: evaluation runs in the training precision",
    "bf16_full_eval": "leave it out: with bf16=True evaluation computes in bfloat16 already",
    "use_cpu": f"set the environment variable PJRT_DEVICE=CPU for XLA on the CPU, or {_PLAIN_TORCH}",
    "include_num_input_tokens_seen": "read num_tokens in the logs: it is counted without waiting for the device",
    "neftune_noise_alpha": f"leave it out, or {_PLAIN_TORCH}",
    "torch_empty_cache_steps": "leave it out: XLA plans memory when it compiles",
    "enable_jit_checkpoint": "leave it out: all hosts already save and stop after a SIGTERM to any host",
    "train_sampling_strategy=batch_rebalance": "leave it out: every batch has the same number of pairs",
    "dataloader_in_order=False": "leave it out: all hosts must use the same batches",
    "debug=underflow": "leave it out: it would wait for the device in every layer; nonfinite_limit checks each step",
    "optim=fused": "use optim='adamw_torch': XLA fuses it automatically",
    "optim=bit|bnb|ademamix": f"use optim='adamw_torch', since bitsandbytes needs CUDA, or {_PLAIN_TORCH}",
    "optim=layerwise|lomo": (
        "use optim='adamw_torch': these optimizers update unsharded weights inside the backward pass"
    ),
}
#: For each runtime, the settings that it does not support, in the form of `LIMITS`.
DEVICE_LIMITS: Mapping[str, Mapping[str, str]] = {
    "xla": XLA_LIMITS,
    "torchtpu": {"use_cpu": "set the environment variable ACCELERATE_USE_CPU=1 for plain torch on the CPU"},
    "native": {},
}
#: Settings that a mesh over several processes does not support, in the form of `LIMITS`.
RANK_LIMITS = {
    **dict.fromkeys(("fsdp", "deepspeed", "parallelism_config"), "leave it out: mesh shards the model"),
    "bf16_full_eval": XLA_LIMITS["bf16_full_eval"],
    "fp16": "use bf16=True: float16 loss scaling would skip steps in only some of the processes",
    "fp16_full_eval": XLA_LIMITS["fp16_full_eval"],
    "auto_find_batch_size": "set per_device_train_batch_size: processes would try different sizes",
    "sharding_plan": "leave it out: transformers shards by its own plan",
    "train_sampling_strategy=group_by_length|batch_rebalance": "leave it out: all processes must use the same order",
    "accelerator_config=use_seedable_sampler=False": "leave use_seedable_sampler on: processes need the same order",
    "accelerator_config=split_batches=True": "leave split_batches out, and set total_batch_size",
    "optim=bit|bnb|ademamix|layerwise|lomo": "use optim='adamw_torch': it can update each process's shards",
}
#: Settings that `group_by_prompt` does not support, in the form of `LIMITS`.
GROUPED_LIMITS = {
    "train_sampling_strategy=sequential|group_by_length|batch_rebalance": "leave it out: prompts have a random order",
}
#: Settings that `resume_from_checkpoint="auto"` does not support, in the form of `LIMITS`.
AUTO_LIMITS = dict.fromkeys(("save_only_model", "fsdp", "deepspeed"), "leave it out, or name a checkpoint")
_OTHER_FIX = "leave it out, or change the other setting"
_SIGMOID_SETTINGS = dict.fromkeys(("ties=davidson|rao_kupper", "average_over=comparisons"), _OTHER_FIX)
_SETTINGS_WITHOUT_TIES = dict.fromkeys(("margin_scale", "label_smoothing"), _OTHER_FIX)
_ADAM_FIX = "choose optim='adamw_torch', or leave optim_state_dtype out"
_GRAD_NORM_LIMITS = dict.fromkeys(("fsdp", "deepspeed", "fp16"), "leave log_grad_norms out: it needs full gradients")
_REMAT_FIX = "leave gradient_checkpointing out, and set remat='full', or remat='dots' to keep matrix products"
_OFFLOAD_FIX = (
    "set scan_layers=True; without it, the TPU's compiler (libtpu 0.0.21) moves layer inputs to the host, but then "
    "needs more memory than without offloading"
)
_DOT_FIX = "leave out use_reentrant and context_fn, since remat='dots' sets them"
_OPTIONS_FIX = "leave out torch's options offload and context_fn; remat='dots' keeps matrix products"

#: Minimum values of settings. Lower values would drop all rows, or fail later with an error that does not name the
#: setting.
AT_LEAST = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("max_length", "row_length", "max_shapes", "pad_to_multiple_of"), 1),
    **dict.fromkeys(("total_batch_size", "max_eval_steps", "ranking_top_k"), 1),
    **dict.fromkeys(("nonfinite_limit", "num_train_epochs", "save_interval_minutes", "seed"), 0),
    **dict.fromkeys(("dataloader_num_workers", "neftune_noise_alpha"), 0),
    "dataset_num_proc": 1,
}
#: Allowed values of settings with a fixed set of values. None means that the setting may be left out.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "packing": ("auto", "true", "false"),
    "packed_attention": ("auto", "masks", "expanded"),
    "truncation_mode": ("keep_start", "keep_end", None),
    "loss_type": ("sigmoid", "plackett_luce", "regression"),
    "ties": ("skip", "davidson", "rao_kupper", None),
    "average_over": ("prompts", "comparisons"),
    "optim_state_dtype": ("bfloat16", None),
    "progress": ("bar", "json"),
}
#: Settings that have no effect unless another setting has a certain value. A key is this condition: NAME=PATTERN,
#: with a regular expression to search for in the other setting's value. A value lists the settings that depend on it.
#: All are fields of `RewardConfig` or `ModelConfig`.
NEEDS = {
    "eval_strategy=steps": "eval_steps",
    "eval_strategy=steps|epoch": "eval_delay metric_for_best_model",
    "save_strategy=steps": "save_steps",
    "logging_strategy=steps": "logging_steps",
    "metric_for_best_model=^(?!None)": "greater_is_better",
    "lr_scheduler_type=^(?!constant$|reduce|greedy)": "warmup_steps",
    "optim=^(?!sgd|ada(grad|factor|lomo)|rmsprop|lomo)": "adam_beta1 adam_beta2 adam_epsilon",
    "optim=^(?!adamw_torch|ada(factor|lomo)|lomo)": "optim_args",
    "optim=galore|apollo": "optim_target_modules",
    "activation_checkpointing=True": "activation_checkpointing_kwargs",
    "max_length=^[0-9]": "truncation_mode",
    "packing=auto|true": "row_length packed_attention",
    "train_sampling_strategy=group_by_length": "length_column_name",
    "use_liger_kernel=True": "liger_kernel_config",
    "push_to_hub=True": "hub_strategy hub_always_push",
    "report_to=trackio": "project trackio_space_id trackio_bucket_id trackio_static_space_id",
    "use_peft=True": "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save "
    "use_rslora use_dora",
    "load_in_4bit=True": "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
}


def check_choices(args: Any, choices: Mapping[str, tuple[str | None, ...]]) -> None:
    """Raise UserError if the value of a setting is not among its allowed values."""
    for setting, values in choices.items():
        if (value := getattr(args, setting)) not in values:
            raise UserError(f"{setting} must be one of {', '.join(map(repr, values))}, got {value!r}.")


def check_values(args: Any) -> None:
    """Reject values outside their ranges, invalid JSON objects, and settings that exclude each other.

    Raises:
        UserError: With the setting, its value and the rule.
    """
    for setting, minimum in AT_LEAST.items():
        value = getattr(args, setting)
        if value is not None and not value >= minimum:
            raise UserError(f"{setting} must be at least {minimum}, or be left out, got {value!r}.")
    check_choices(args, CHOICES)
    for setting in args._VALID_DICT_FIELDS:
        value = getattr(args, setting)
        if isinstance(value, str) and (value.startswith("{") or setting.endswith("_kwargs")):
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(value)
            if not isinstance(value, dict):  # transformers accepts it, or raises an error without the name
                raise UserError(f'{setting} must be a JSON object such as {{"name": 1}}, got {value}.')
    if not 0 < args.tie_threshold < math.inf:
        raise UserError(f"tie_threshold must be a number above 0, got {args.tie_threshold!r}.")
    if not 0 <= args.label_smoothing < 0.5:
        raise UserError(f"label_smoothing must be at least 0 and below 0.5, got {args.label_smoothing!r}.")
    names, weights, loss_weights = args.attributes or [], args.attribute_weights, args.attribute_loss_weights
    # one count for names, distinct names and weights: 0 without attributes, otherwise at least 2
    counts = {len(values) for values in (names, set(names), weights, loss_weights) if values is not None}
    is_finite = math.isfinite(sum([*(weights or []), *(loss_weights or [])]))
    if counts not in ({0}, {max(2, len(names))}) or not is_finite or not min(loss_weights or [1.0]) > 0:
        raise UserError(
            f"attributes={names} must be at least two different names, attribute_weights={weights} one finite number "
            f"per attribute, and attribute_loss_weights={loss_weights} one positive finite number per attribute."
        )
    with explaining(f"frozen_parameters={args.frozen_parameters!r} is not a valid regular expression", "Correct it."):
        re.compile(args.frozen_parameters or "")
    is_sigmoid, learns_ties = args.loss_type == "sigmoid", args.ties in ("davidson", "rao_kupper")
    check_tables(
        args,
        (True, LIMITS, "not supported"),
        (args.group_by_prompt, GROUPED_LIMITS, "impossible with group_by_prompt=True"),
        (args.resume_from_checkpoint == "auto", AUTO_LIMITS, "impossible with resume_from_checkpoint='auto'"),
        (args.attributes, {"average_over=comparisons": "leave it out"}, "not supported with attributes"),
        (not is_sigmoid, _SIGMOID_SETTINGS, "only for loss_type='sigmoid'"),
        (not is_sigmoid or learns_ties, _SETTINGS_WITHOUT_TIES, "only for loss_type='sigmoid' without ties"),
        (args.loss_type != "plackett_luce", {"ranking_top_k": _OTHER_FIX}, "only for loss_type='plackett_luce'"),
        (args.optim_state_dtype, {"optim=^(?!adamw_torch(_fused)?$)": _ADAM_FIX}, "impossible with optim_state_dtype"),
        (args.log_grad_norms, _GRAD_NORM_LIMITS, "impossible with log_grad_norms"),
        (not learns_ties, {r"tie_threshold=^(?!1(\.0)?$)": _OTHER_FIX}, "only for ties='davidson' and 'rao_kupper'"),
    )
    _ = args.remat_policy, args.time_limit  # both raise UserError on invalid values


def check_tables(args: Any, *tables: tuple[Any, Mapping[str, str], str]) -> None:
    """Call `check_limits` for each table that applies.

    Args:
        args: The settings to check.
        tables: Tuples of a condition and the arguments ``limits`` and ``what`` of `check_limits`. The table applies if
            the condition is true.
    """
    for applies, limits, what in tables:
        if applies:
            check_limits(args, limits, what)


def check_limits(args: Any, limits: Mapping[str, str], what: str) -> None:
    """Reject settings that are not supported.

    Args:
        args: The settings to check.
        limits: Advice for each rejected setting, in the form of `LIMITS`.
        what: Reason in the message "SETTING=VALUE is REASON", such as "not supported".

    Raises:
        UserError: With the setting, its value, the reason and the advice.
    """
    for key, advice in limits.items():
        setting, _, pattern = key.partition("=")
        value = getattr(args, setting)
        value = getattr(value, "value", value)  # an enum's text
        # without a pattern, any value is rejected that turns the setting on
        if re.search(pattern, str(value)) if pattern else value and value != "no":
            raise UserError(f"{setting}={value!r} is {what}: {advice}.")


def warn_of_unmet_needs(args: Any, needs: Mapping[str, str] = NEEDS) -> None:
    """Warn of each setting in the dataclass ``args`` that has no effect: its condition in `NEEDS` is not met."""
    defaults = {item.name: item.default for item in fields(args)}
    for need, settings in needs.items():
        other, _, pattern = need.partition("=")
        for setting in settings.split() if other in defaults else ():
            value, condition = (getattr(raw, "value", raw) for raw in (getattr(args, setting), getattr(args, other)))
            if value != defaults[setting] and not re.search(pattern, str(condition)):
                # a pattern with ^ is not a value to set
                change = f"change {other}" if "^" in pattern else f"set {need}"
                logger.warning("%s=%r has no effect with %s=%r: %s.", setting, value, other, condition, change)


def check_one_gpu(count: int) -> None:
    """Raise UserError if a process would use several GPUs by `nn.DataParallel`, as transformers does."""
    if count > 1:
        raise UserError(
            f"One process sees {count} GPUs, and nn.DataParallel is not supported. Launch one process per GPU "
            "(torchrun --nproc_per_node=...), or make one GPU visible (CUDA_VISIBLE_DEVICES=0)."
        )


def check_trackers(args: Any) -> None:
    """Raise UserError if `report_to` names a tracker that is not installed.

    transformers would raise only after it has loaded the model.
    """
    installed = {*get_available_reporting_integrations(), *["flyte"] * is_flytekit_available()}
    if missing := sorted({*args.report_to} - installed):
        raise UserError(
            f"report_to={args.report_to} names {', '.join(missing)}, but no such tracker is installed. Install it, "
            "correct its name, or leave it out of report_to."
        )


def warn_of_high_learning_rate(args: Any, model: Any) -> None:
    """Warn if a full model is trained at TRL's default learning rate. That rate is meant for adapters."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    if args.learning_rate == 1e-4 and trained > sum(size for size, _ in sizes) / 2:
        logger.warning(
            "learning_rate=1e-4, TRL's default, is for adapters (--use_peft) and much too high for a full model. "
            "Common rates: 1e-5 for 0.5B, 2e-6 for 1B, 2e-6 to 9e-6 for 8B parameters."
        )


def check_remat(args: Any) -> None:
    """Reject contradictory settings of recomputation. Call this after transformers' ``__post_init__``.

    Raises:
        UserError: With both settings and what to do instead.
    """
    policy, on_xla = args.remat_policy, runtime.current().is_spmd
    if args.remat is not None and (policy != Remat.NONE) != bool(args.activation_checkpointing):
        raise UserError(
            f"remat={args.remat!r} contradicts gradient_checkpointing={args.activation_checkpointing}: leave "
            "gradient_checkpointing out, or choose remat='none' to keep all activations."
        )
    # a key that matches if one of these options is set to a value other than None or False
    options = "activation_checkpointing_kwargs='({})': (?!None|False)"
    check_tables(
        args,
        (not on_xla, {"scan_layers": "leave it out"}, "only for PyTorch/XLA"),
        (policy == Remat.NONE, {"scan_layers": _REMAT_FIX}, "impossible without recomputation of layers"),
        (on_xla and not args.scan_layers, {"activation_offloading": _OFFLOAD_FIX}, "impossible without scan_layers"),
        (policy == Remat.DOTS, {options.format("use_reentrant|context_fn"): _DOT_FIX}, "impossible with remat='dots'"),
        (on_xla, {options.format("offload|context_fn"): _OPTIONS_FIX}, "impossible on PyTorch/XLA"),
    )
