"""Settings that cannot be meant, or that PyTorch/XLA cannot honor, each with what to do instead."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, cast

from transformers import TrainingArguments

from .. import runtime
from ..errors import UserError
from ..runtime import Remat

_PLAIN_TORCH = "train on plain torch with USE_TORCH_XLA=0"

#: Settings that XLA cannot honor, and what to do instead.
XLA_LIMITS = {
    "fsdp": "shard with mesh='fsdp=-1', which needs no wrapper (transformers' XLA path saves broken files)",
    "deepspeed": "shard with mesh='fsdp=-1', which is ZeRO-3 without DeepSpeed",
    "parallelism_config": "arrange the devices with mesh",
    "use_liger_kernel": "leave it out: its Triton kernels are for GPUs, and XLA fuses by itself",
    "auto_find_batch_size": "set per_device_train_batch_size: every size tried would be compiled anew",
    "torch_compile": "leave it out: XLA compiles every step already",
    "fp16": "use bf16=True: XLA devices have no float16 loss scaling",
    "fp16_full_eval": "leave it out: evaluation runs in the training precision",
    "bf16_full_eval": "leave it out: with bf16=True evaluation computes in bfloat16 already",
    "use_cpu": f"set the environment variable PJRT_DEVICE=CPU for XLA on the CPU, or {_PLAIN_TORCH}",
    "include_num_input_tokens_seen": "read num_tokens in the logs, which counts them without stopping the device",
    "neftune_noise_alpha": f"leave it out, or {_PLAIN_TORCH}",
    "torch_empty_cache_steps": "leave it out: XLA plans memory when it compiles",
}

#: The same of several hosts.
HOSTS_LIMITS = {
    "enable_jit_checkpoint": (
        "it saves on the host that is told to stop, and the others would wait for it. Leave it out: a SIGTERM to any "
        "host lets all of them save and stop"
    ),
}

#: The same of optimizers, by what is in their names.
OPTIMIZER_LIMITS = {
    ("fused",): "use optim='adamw_torch', which XLA fuses by itself",
    ("bit", "bnb", "ademamix"): f"use optim='adamw_torch'; bitsandbytes needs CUDA, or {_PLAIN_TORCH}",
    ("layerwise", "lomo"): (
        "use optim='adamw_torch': these update weights inside the backward pass, which no layout of theirs reaches"
    ),
}


class Rule(NamedTuple):
    """What a value must be, in words and as a check."""

    words: str
    holds: Callable[[Any], bool]


_NAMED = Rule("a name, not empty", lambda value: value != "")
_AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
_AT_LEAST_0 = Rule("0 or more", lambda value: value >= 0)
_AMOUNT = Rule("a finite number, 0 or more", lambda value: 0 <= value < math.inf)
_BELOW_1 = Rule("0 or more and below 1", lambda value: 0 <= value < 1)
_FINITE = Rule("a finite number", math.isfinite)
_INTERVAL = Rule(
    "a whole number above 0, or a fraction of all steps",
    lambda value: 0 < value < math.inf and (value < 1 or value == int(value)),
)
_ASSIGNMENTS = Rule(
    "name=value, or several with commas between",
    lambda value: value == "" or (isinstance(value, str) and all(part.count("=") == 1 for part in value.split(","))),
)
_SEED = Rule("from 0 to 4294967295", lambda value: 0 <= value < 2**32)
_YEAR = 365 * 24 * 60  # minutes
_MINUTES = Rule(f"above 0 and at most {_YEAR}, a year", lambda value: 0 < value <= _YEAR)

_PAIRS = "The pairs of a step are per_device_train_batch_size x devices x gradient_accumulation_steps"
_FITTING = "Leave it out for a value that fits the data and the device"
_DEFAULT = "Leave it out for the default"

#: What transformers and torch find out only after the model is loaded, or never; and what to do instead. None is
#: always a setting left out.
RULES: dict[str, tuple[Rule, str]] = {
    "per_device_train_batch_size": (_AT_LEAST_1, _PAIRS),
    "gradient_accumulation_steps": (_AT_LEAST_1, _PAIRS),
    "per_device_eval_batch_size": (_AT_LEAST_1, "To leave out evaluation set eval_strategy='no'"),
    "max_length": (_AT_LEAST_1, "Set it to None to keep pairs of every length"),
    "row_length": (_AT_LEAST_1, _FITTING),
    "max_shapes": (_AT_LEAST_1, _FITTING),
    "pad_to_multiple_of": (_AT_LEAST_1, _FITTING),
    "nonfinite_limit": (_AT_LEAST_0, "0 turns it off, 1 stops after the first step that is not finite"),
    "num_train_epochs": (_AMOUNT, "Or set max_steps instead"),
    "dataset_num_proc": (_AT_LEAST_0, "0 does the work in this process"),
    "dataloader_num_workers": (_AT_LEAST_0, "0 does the work in this process"),
    "dataloader_prefetch_factor": (_AT_LEAST_1, _DEFAULT),
    "learning_rate": (_AMOUNT, _DEFAULT),
    "warmup_ratio": (_BELOW_1, "It is a fraction of all steps; warmup_steps counts them"),
    "warmup_steps": (_AMOUNT, "Below 1 it is a fraction of all steps"),
    "weight_decay": (_AMOUNT, _DEFAULT),
    "max_grad_norm": (_AMOUNT, _DEFAULT),
    "adam_beta1": (_BELOW_1, _DEFAULT),
    "adam_beta2": (_BELOW_1, _DEFAULT),
    "adam_epsilon": (_AMOUNT, _DEFAULT),
    "optim_args": (_ASSIGNMENTS, "For example optim_args='momentum=0.9,nesterov=true' with optim='sgd'"),
    "neftune_noise_alpha": (_AMOUNT, "Leave it out for no noise"),
    "eval_delay": (_FINITE, _DEFAULT),
    "center_rewards_coefficient": (_FINITE, "0.01 is recommended; leave it out not to center"),
    "save_interval_minutes": (_MINUTES, "Leave it out to save only when save_strategy says so"),
    "seed": (_SEED, "numpy takes no other seed"),
    "data_seed": (_SEED, "numpy takes no other seed"),
    "output_dir": (_NAMED, "Leave it out for trainer_output"),
    "resume_from_checkpoint": (_NAMED, "Name a checkpoint's folder, or leave it out to start anew"),
}
#: What is about the processes that load data.
_ABOUT_WORKERS = (
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
)


def check_ranges(args: Any) -> None:
    """Refuse values outside their ranges, mappings that are no JSON objects, and an output folder that is a file.

    Raises:
        UserError: Names the setting, its value, the rule and what to do instead.
    """
    for setting in args._VALID_DICT_FIELDS:
        _check_json(setting, getattr(args, setting))
    for setting, (rule, instead) in RULES.items():
        _check_range(setting, getattr(args, setting), rule, instead)
    for kind in ("logging", "eval", "save"):
        if getattr(args, f"{kind}_strategy") == "steps":  # else nobody reads it
            _check_range(
                f"{kind}_steps", getattr(args, f"{kind}_steps"), _INTERVAL, f"For none set {kind}_strategy='no'"
            )
    for setting in _ABOUT_WORKERS:
        if getattr(args, setting) and not args.dataloader_num_workers:
            raise UserError(
                f"{setting}={getattr(args, setting)!r} is about processes that load data, and there are none: set "
                "dataloader_num_workers to 1 or more, or leave it out."
            )
    try:
        _ = args.time_limit
    except ValueError as error:
        raise UserError(f"training_time_limit: {error}") from None
    if args.output_dir is not None and os.path.exists(args.output_dir) and not os.path.isdir(args.output_dir):
        raise UserError(f"output_dir {args.output_dir} is a file. Name a folder; it need not exist.")


def _check_range(setting: str, value: Any, rule: Rule, instead: str) -> None:
    try:
        holds = value is None or rule.holds(value)
    except TypeError:  # text where a number belongs, say
        holds = False
    if not holds:
        raise UserError(f"{setting} must be {rule.words}, got {value!r}. {instead}.")


def _check_json(setting: str, value: Any) -> None:
    """Refuse what is no JSON object. Some settings may also name a JSON file, which transformers reads."""
    if setting.endswith("_kwargs") and not isinstance(value, str | dict | None):
        raise UserError(f"{setting} must be a mapping of names to values, not {value!r:.80}.")
    if not isinstance(value, str) or not (value.startswith("{") or setting.endswith("_kwargs")):
        return
    try:
        read = json.loads(value)
    except json.JSONDecodeError as error:
        raise UserError(
            f'{setting} must be a JSON object such as {{"name": 1}}, but {value} is no JSON: {error.msg} (column '
            f"{error.colno}). Write names and texts in double quotes."
        ) from error
    if not isinstance(read, dict):
        raise UserError(f'{setting} must be a JSON object such as {{"name": 1}}, not {value}.')


def check_choices(args: Any) -> None:
    """Refuse words that are none of a setting's.

    Raises:
        UserError: Names the setting, its value and the words.
    """
    _ = args.remat_policy
    for each in fields(TrainingArguments):
        value, choices = getattr(args, each.name), each.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise UserError(f"{each.name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    if args.packed_attention not in ("auto", "masks", "expanded"):
        raise UserError(f"packed_attention must be 'auto', 'masks' or 'expanded', got {args.packed_attention!r}.")
    if args.activation_offloading:
        raise UserError(
            "activation_offloading is not supported: keep gradient_checkpointing=True, which recomputes activations "
            "instead of storing them anywhere, or use a larger mesh."
        )


def check_xla_limits(args: Any, hosts: int = 1) -> None:
    """Refuse settings that XLA cannot honor, or not on several ``hosts``.

    Raises:
        UserError: Names the setting, its value and what to do instead.
    """
    where = "PyTorch/XLA" if hosts == 1 else f"PyTorch/XLA on {hosts} hosts"
    optimizer = getattr(args.optim, "value", args.optim)
    limits = XLA_LIMITS if hosts == 1 else XLA_LIMITS | HOSTS_LIMITS
    for setting, instead in limits.items():
        value = getattr(args, setting)
        value = getattr(value, "value", value)  # an enum's text
        if value and value != "no":
            raise UserError(f"{setting}={value!r} is impossible on {where}: {instead}.")
    for marks, instead in OPTIMIZER_LIMITS.items():
        if any(mark in optimizer for mark in marks):
            raise UserError(f"optim={optimizer!r} is impossible on {where}: {instead}.")


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
    if args.scan_layers and not runtime.current().compiles:
        raise UserError("scan_layers=True shortens what XLA compiles, and plain torch compiles nothing: leave it out.")
    if args.scan_layers and policy == Remat.NONE:
        raise UserError(
            "scan_layers=True computes layers again in the backward: choose remat='full' or, to keep their matrix "
            "products, remat='dots', and leave gradient_checkpointing out."
        )
    options = cast("dict[str, Any]", args.activation_checkpointing_kwargs or {})
    taken = [name for name in ("use_reentrant", "context_fn") if options.get(name)]
    if policy == Remat.DOTS and taken:
        raise UserError(
            f"remat='dots' sets {' and '.join(taken)} by itself: leave it out of gradient_checkpointing_kwargs, "
            "or choose remat='full'."
        )
