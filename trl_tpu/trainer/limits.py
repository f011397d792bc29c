"""Settings that cannot be meant, or that PyTorch/XLA cannot honor, each with what to do instead."""

import json
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from .. import runtime
from ..errors import UserError
from ..runtime import Remat


class Limit(NamedTuple):
    """A setting, what makes it impossible on XLA, and the way out."""

    setting: str
    is_impossible: Callable[[Any], bool]
    instead: str


_PLAIN_TORCH = "train on plain torch with USE_TORCH_XLA=0"
XLA_LIMITS = (
    Limit(
        "fsdp", bool, "shard with mesh='fsdp=-1', which needs no wrapper (transformers' XLA path saves broken files)"
    ),
    Limit("deepspeed", bool, "shard with mesh='fsdp=-1', which is ZeRO-3 without DeepSpeed"),
    Limit("parallelism_config", bool, "arrange the devices with mesh"),
    Limit("use_liger_kernel", bool, "leave it out: its Triton kernels are for GPUs, and XLA fuses by itself"),
    Limit("auto_find_batch_size", bool, "set per_device_train_batch_size: every size tried would be compiled anew"),
    Limit("torch_compile", bool, "leave it out: XLA compiles every step already"),
    Limit("fp16", bool, "use bf16=True: XLA devices have no float16 loss scaling"),
    Limit("fp16_full_eval", bool, "leave it out: evaluation runs in the training precision"),
    Limit("bf16_full_eval", bool, "leave it out: with bf16=True evaluation computes in bfloat16 already"),
    Limit("use_cpu", bool, f"set the environment variable PJRT_DEVICE=CPU for XLA on the CPU, or {_PLAIN_TORCH}"),
    Limit("optim", lambda name: "fused" in name, "use optim='adamw_torch', which XLA fuses by itself"),
    Limit(
        "optim",
        lambda name: any(mark in name for mark in ("bit", "bnb", "ademamix")),
        f"use optim='adamw_torch'; bitsandbytes needs CUDA, or {_PLAIN_TORCH}",
    ),
    Limit(
        "optim",
        lambda name: any(mark in name for mark in ("layerwise", "lomo")),
        "use optim='adamw_torch': these update weights inside the backward pass, which no layout of theirs reaches",
    ),
    Limit(
        "include_num_input_tokens_seen",
        lambda value: value not in (False, "no"),
        "read num_tokens in the logs, which counts them without stopping the device at every batch",
    ),
    Limit("neftune_noise_alpha", bool, f"leave it out, or {_PLAIN_TORCH}"),
    Limit("torch_empty_cache_steps", bool, "leave it out: XLA plans memory when it compiles"),
)

HOSTS_LIMITS = (
    Limit(
        "enable_jit_checkpoint",
        bool,
        "it saves on the host that is told to stop, and the others would wait for it. Leave it out: a SIGTERM to any "
        "host lets all of them save and stop",
    ),
)


_YEAR = 365 * 24 * 60  # minutes


class Range(NamedTuple):
    """Settings of one kind, what their values must be, and the way out."""

    settings: tuple[str, ...]
    is_within: Callable[[Any], bool]
    rule: str
    instead: str


# What transformers and torch find out only after the model is loaded, or never. None is always a setting left out.
RANGES = (
    Range(
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        lambda value: value >= 1,
        "at least 1",
        "The pairs of a step are per_device_train_batch_size x devices x gradient_accumulation_steps",
    ),
    Range(
        ("per_device_eval_batch_size",),
        lambda value: value >= 1,
        "at least 1",
        "To leave out evaluation set eval_strategy='no'",
    ),
    Range(
        ("row_length", "max_shapes"),
        lambda value: value >= 1,
        "at least 1",
        "Leave it out for a value that fits the data",
    ),
    Range(
        ("nonfinite_limit",),
        lambda value: value >= 0,
        "at least 0",
        "0 turns it off, 1 stops after the first step that is not finite",
    ),
    Range(
        ("save_interval_minutes",),
        lambda value: 0 < value <= _YEAR,
        f"above 0 and at most {_YEAR}, a year",
        "Leave it out to save only when save_strategy says so",
    ),
    Range(("max_length",), lambda value: value >= 1, "at least 1", "Set it to None to keep pairs of every length"),
    Range(
        ("pad_to_multiple_of",),
        lambda value: value >= 1,
        "at least 1",
        "Leave it out for lengths that fit the data and the device",
    ),
    Range(("num_train_epochs",), lambda value: value >= 0, "0 or more", "Or set max_steps instead"),
    Range(
        ("learning_rate", "weight_decay", "max_grad_norm"),
        lambda value: 0 <= value < math.inf,
        "a finite number, 0 or more",
        "Leave it out for the default",
    ),
    Range(
        ("center_rewards_coefficient",),
        math.isfinite,
        "a finite number",
        "0.01 is recommended; leave it out not to center",
    ),
    Range(
        ("dataset_num_proc", "dataloader_num_workers"),
        lambda value: value >= 0,
        "0 or more",
        "0 does the work in this process",
    ),
    Range(
        ("seed", "data_seed"), lambda value: 0 <= value < 2**32, "from 0 to 4294967295", "numpy takes no other seed"
    ),
)


def check_ranges(args: Any) -> None:
    """Refuse values outside their ranges, mappings that are no JSON objects, and an output folder that is a file.

    Raises:
        UserError: Names the setting, its value, the rule and what to do instead.
    """
    for setting in args._VALID_DICT_FIELDS:
        _check_json(setting, getattr(args, setting))
    for allowed in RANGES:
        for setting in allowed.settings:
            value = getattr(args, setting)
            if value is not None and not allowed.is_within(value):
                raise UserError(f"{setting} must be {allowed.rule}, got {value}. {allowed.instead}.")
    try:
        _ = args.time_limit
    except ValueError as error:
        raise UserError(f"training_time_limit: {error}") from None
    if args.output_dir is not None and os.path.exists(args.output_dir) and not os.path.isdir(args.output_dir):
        raise UserError(f"output_dir {args.output_dir} is a file. Name a folder; it need not exist.")


def _check_json(setting: str, value: Any) -> None:
    """Refuse text that is no JSON object. Some settings may also name a JSON file, which transformers reads."""
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
    for limit in XLA_LIMITS if hosts == 1 else (*XLA_LIMITS, *HOSTS_LIMITS):
        value = getattr(args, limit.setting)
        value = getattr(value, "value", value)  # an enum's text
        if limit.is_impossible(value):
            raise UserError(f"{limit.setting}={value!r} is impossible on {where}: {limit.instead}.")


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


__all__ = [
    "HOSTS_LIMITS",
    "RANGES",
    "XLA_LIMITS",
    "Limit",
    "Range",
    "check_choices",
    "check_ranges",
    "check_remat",
    "check_xla_limits",
]
