"""Checks of settings: what is rejected, with the way out, and arguments that TRL has renamed or removed."""

import argparse
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import transformers
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from .. import runtime
from ..errors import UserError
from ..runtime import Remat

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


_PLAIN_TORCH = "train on plain torch with USE_TORCH_XLA=0"

#: Settings that are honored nowhere, and what to do instead: by name, or as `name=` and what values have in them.
LIMITS = {
    "include_for_metrics=inputs": "leave it out, and read the evaluation data, whose order predictions have",
    "eval_do_concat_batches=False": "leave it out: compute_metrics is given one array of all pairs",
}
#: The same of settings that XLA cannot honor.
XLA_LIMITS = {
    "fsdp": "shard with mesh='fsdp=-1', which needs no wrapper (transformers' XLA path saves broken files)",
    "deepspeed": "shard with mesh='fsdp=-1', which is ZeRO-3 without DeepSpeed",
    "parallelism_config": "arrange the devices with mesh",
    "use_liger_kernel": "leave it out: its Triton kernels are for GPUs, and XLA fuses by itself",
    "auto_find_batch_size": "set per_device_train_batch_size: every size tried would be compiled anew",
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), "leave it out: XLA compiles anyway"
    ),
    "fp16": "use bf16=True: XLA devices have no float16 loss scaling",
    "fp16_full_eval": "leave it out: evaluation runs in the training precision",
    "bf16_full_eval": "leave it out: with bf16=True evaluation computes in bfloat16 already",
    "use_cpu": f"set the environment variable PJRT_DEVICE=CPU for XLA on the CPU, or {_PLAIN_TORCH}",
    "include_num_input_tokens_seen": "read num_tokens in the logs, which counts them without stopping the device",
    "neftune_noise_alpha": f"leave it out, or {_PLAIN_TORCH}",
    "torch_empty_cache_steps": "leave it out: XLA plans memory when it compiles",
    "enable_jit_checkpoint": "leave it out: a SIGTERM to any host lets all of them save and stop without it",
    "train_sampling_strategy=batch_rebalance": "leave it out: every batch has the same number of pairs",
    "dataloader_in_order=False": "leave it out: all hosts have to take the same batches",
    "debug=underflow": "leave it out: it would stop the device in every layer; see nonfinite_limit, which is on",
    "optim=fused": "use optim='adamw_torch', which XLA fuses by itself",
    "optim=bit|bnb|ademamix": f"use optim='adamw_torch'; bitsandbytes needs CUDA, or {_PLAIN_TORCH}",
    "optim=layerwise|lomo": (
        "use optim='adamw_torch': these update weights inside the backward pass, which no layout of theirs reaches"
    ),
}
#: The same of TorchTPU.
TORCHTPU_LIMITS = {
    "use_cpu": "set the environment variable ACCELERATE_USE_CPU=1, which chooses plain torch on the CPU"
}
#: The same of settings that a mesh over several processes cannot honor.
RANK_LIMITS = {
    **dict.fromkeys(("fsdp", "deepspeed", "parallelism_config"), "leave it out: mesh splits the model"),
    "bf16_full_eval": XLA_LIMITS["bf16_full_eval"],
    "fp16": "use bf16=True: a loss scale would skip steps in some processes alone",
    "fp16_full_eval": XLA_LIMITS["fp16_full_eval"],
    "auto_find_batch_size": "set per_device_train_batch_size: processes would try different ones",
    "sharding_plan": "leave it out: transformers splits by its own plan",
    "train_sampling_strategy=group_by_length|batch_rebalance": "leave it out: all processes have to take one order",
    "accelerator_config=use_seedable_sampler=False": "leave use_seedable_sampler on: all have to take one order",
    "accelerator_config=split_batches=True": "leave split_batches out, and set total_batch_size",
    "optim=bit|bnb|ademamix|layerwise|lomo": "use optim='adamw_torch', which updates each process's part",
}
#: The same of settings with `group_by_prompt`.
GROUPED_LIMITS = {
    "train_sampling_strategy=sequential|group_by_length|batch_rebalance": "leave it out: prompts come in random order",
}
#: Settings whose smaller values would end in an error that names none, or leave everything out.
AT_LEAST = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("max_length", "row_length", "max_shapes", "pad_to_multiple_of"), 1),
    **dict.fromkeys(("total_batch_size", "max_eval_steps", "ranking_top_k"), 1),
    **dict.fromkeys(("nonfinite_limit", "num_train_epochs", "save_interval_minutes"), 0),
}


def check_values(args: Any) -> None:
    """Refuse values outside their ranges, and mappings that are no JSON objects.

    Raises:
        UserError: Names the setting, its value and the rule.
    """
    for setting, least in AT_LEAST.items():
        value = getattr(args, setting)
        if value is not None and not value >= least:
            raise UserError(f"{setting} must be at least {least}, or be left out, got {value!r}.")
    for setting in args._VALID_DICT_FIELDS:
        value = getattr(args, setting)
        if isinstance(value, str) and (value.startswith("{") or setting.endswith("_kwargs")):
            try:
                is_mapping = isinstance(json.loads(value), dict)
            except json.JSONDecodeError:
                is_mapping = False
            if not is_mapping:  # transformers would leave the text as it is, or not say whose it is
                raise UserError(f'{setting} must be a JSON object such as {{"name": 1}}, got {value}.')
    if args.packing not in ("auto", "true", "false"):
        raise UserError(f"packing must be 'auto', true or false, got {args.packing!r}.")
    if args.packed_attention not in ("auto", "masks", "expanded"):
        raise UserError(f"packed_attention must be 'auto', 'masks' or 'expanded', got {args.packed_attention!r}.")
    if args.truncation_mode not in (None, "keep_start", "keep_end"):
        raise UserError(f"truncation_mode must be 'keep_start' or 'keep_end', got {args.truncation_mode!r}.")
    if args.loss_type not in ("sigmoid", "plackett_luce", "regression"):
        raise UserError(f"loss_type must be 'sigmoid', 'plackett_luce' or 'regression', got {args.loss_type!r}.")
    if args.ties not in (None, "skip", "davidson", "rao_kupper"):
        raise UserError(f"ties must be 'skip', 'davidson' or 'rao_kupper', or be left out, got {args.ties!r}.")
    if not 0 < args.tie_threshold < math.inf:
        raise UserError(f"tie_threshold must be a number above 0, got {args.tie_threshold!r}.")
    if not 0 <= args.label_smoothing < 0.5:
        raise UserError(f"label_smoothing must be at least 0 and below 0.5, got {args.label_smoothing!r}.")
    learns_ties = args.ties in ("davidson", "rao_kupper")
    if args.loss_type != "sigmoid" or learns_ties:
        for setting in ("margin_scale", "label_smoothing"):
            if getattr(args, setting):
                raise UserError(
                    f"{setting} is of comparisons without ties: leave it out, or set loss_type='sigmoid', ties=None."
                )
    if args.average_over not in ("prompts", "comparisons"):
        raise UserError(f"average_over must be 'prompts' or 'comparisons', got {args.average_over!r}.")
    if args.loss_type != "sigmoid" and (learns_ties or args.average_over == "comparisons"):
        raise UserError(
            f"ties={args.ties!r} and average_over={args.average_over!r}: learning from ties and counting comparisons "
            "are of loss_type='sigmoid'. Set that, or leave them out."
        )
    if args.loss_type != "plackett_luce" and args.ranking_top_k is not None:
        raise UserError("ranking_top_k is of an order: leave it out, or set loss_type='plackett_luce'.")
    if not learns_ties and args.tie_threshold != 1.0:
        raise UserError(f"tie_threshold={args.tie_threshold!r} requires ties='davidson' or 'rao_kupper'.")
    _check_attributes(args)
    try:
        re.compile(args.frozen_parameters or "")
    except re.error as error:
        raise UserError(f"frozen_parameters={args.frozen_parameters!r} is no regular expression: {error}.") from error
    check_limits(args, LIMITS, "not supported")
    if args.group_by_prompt:
        check_limits(args, GROUPED_LIMITS, "impossible with group_by_prompt=True")
    _ = args.remat_policy, args.time_limit  # which say what is wrong with them


def _check_attributes(args: Any) -> None:
    names, weights, loss_weights = args.attributes or [], args.attribute_weights, args.attribute_loss_weights
    counts = {len(each) for each in (names, set(names), weights, loss_weights) if each is not None}
    is_finite = math.isfinite(sum([*(weights or []), *(loss_weights or [])]))
    if counts not in ({0}, {max(2, len(names))}) or not is_finite or not min(loss_weights or [1.0]) > 0:
        raise UserError(
            f"attributes={names} must be two names or more, each once, attribute_weights={weights} a number for each, "
            f"and attribute_loss_weights={loss_weights} a positive one."
        )
    check_limits(args, {"average_over=comparisons": "leave it out"} if names else {}, "not of attributes")


def check_limits(args: Any, limits: Mapping[str, str], what: str) -> None:
    """Refuse settings that are not honored.

    Args:
        limits: `LIMITS`, or those of a device.
        what: What such a setting is.

    Raises:
        UserError: Names the setting, its value and what to do instead.
    """
    for key, instead in limits.items():
        setting, _, part = key.partition("=")
        value = getattr(args, setting)
        value = getattr(value, "value", value)  # an enum's text
        if re.search(part, str(value)) if part else value and value != "no":
            raise UserError(f"{setting}={value!r} is {what}: {instead}.")


def check_trackers(args: Any) -> None:
    """Raise UserError where `report_to` names a tracker that is not installed: transformers loads all models first."""
    known = set(INTEGRATION_TO_CALLBACK) - {"flyte"}  # of which transformers does not say whether it is there
    if missing := sorted(known.intersection(args.report_to) - set(get_available_reporting_integrations())):
        raise UserError(
            f"report_to={args.report_to} names {', '.join(missing)}, of which the package is not installed: install "
            "it, or leave it out of report_to."
        )


def check_remat(args: Any) -> None:
    """Refuse choices of what to compute again that contradict one another. transformers has read the others by now.

    Raises:
        UserError: Names both, and what to do instead.
    """
    policy = args.remat_policy
    if args.remat is not None and (policy != Remat.NONE) != bool(args.activation_checkpointing):
        raise UserError(
            f"remat={args.remat!r} contradicts gradient_checkpointing={args.activation_checkpointing}: leave "
            "gradient_checkpointing out, or choose remat='none' to keep all activations."
        )
    if args.scan_layers and not runtime.current().records_steps:
        raise UserError("scan_layers=True shortens what XLA compiles, and plain torch compiles nothing: leave it out.")
    if args.scan_layers and policy == Remat.NONE:
        raise UserError(
            "scan_layers=True computes layers again in the backward: choose remat='full' or, to keep their matrix "
            "products, remat='dots', and leave gradient_checkpointing out."
        )
    if args.activation_offloading and not args.scan_layers and runtime.current().records_steps:
        raise UserError(
            "activation_offloading=True needs scan_layers=True on XLA: tried on layers one by one, the TPU's compiler "
            "(libtpu 0.0.21) moves their inputs to the host, and then needs more memory than before."
        )
    options = args.activation_checkpointing_kwargs or {}
    if policy == Remat.DOTS and (options.get("use_reentrant") or options.get("context_fn")):
        raise UserError("remat='dots' sets use_reentrant and context_fn by itself: leave both out of checkpointing.")
    if runtime.current().records_steps and (options.get("offload") or options.get("context_fn")):
        raise UserError(
            "offload and context_fn of checkpointing are options of torch's own, which PyTorch/XLA cannot use: leave "
            "them out, or choose what is kept with remat='dots'."
        )


def check_final_rate(args: Any, optimizer: Any) -> None:
    """Raise UserError where an optimizer begins at a learning rate that is not above `learning_rate_end`."""
    rate = min(optimizer.defaults["lr"], *(group["lr"] for group in optimizer.param_groups))
    if rate <= args.learning_rate_end:
        raise UserError(
            f"learning_rate_end={args.learning_rate_end} must be below every learning rate of the optimizer, but one "
            f"is {rate}. Lower learning_rate_end, or raise that rate."
        )
