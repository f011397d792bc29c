"""Settings inherited from transformers that PyTorch/XLA cannot honour, each with what to do instead."""

from collections.abc import Callable
from typing import Any, NamedTuple


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


def check_xla_limits(args: Any, hosts: int = 1) -> None:
    """Refuse settings that XLA cannot honour, or not on several ``hosts``.

    Raises:
        ValueError: Names the setting, its value and what to do instead.
    """
    where = "PyTorch/XLA" if hosts == 1 else f"PyTorch/XLA on {hosts} hosts"
    for limit in XLA_LIMITS if hosts == 1 else (*XLA_LIMITS, *HOSTS_LIMITS):
        value = getattr(args, limit.setting)
        value = getattr(value, "value", value)  # an enum's text
        if limit.is_impossible(value):
            raise ValueError(f"{limit.setting}={value!r} is impossible on {where}: {limit.instead}.")


__all__ = ["HOSTS_LIMITS", "XLA_LIMITS", "Limit", "check_xla_limits"]
