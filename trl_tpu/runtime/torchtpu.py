"""TorchTPU: TPUs as torch's own accelerator, one process a device, operations that run one by one as on a GPU.

Each operation is a program, compiled anew for each shape; `Runtime.compiled` makes one of many.

References: https://docs.cloud.google.com/tpu/docs/pytorch-tpu
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from .device_choice import CPU
from .native import PATIENCE, Runtime

# that one function is compiled for; torch's own limit, of 8, is meant for code that varies by chance
_MOST_SHAPES = 256


class TorchTpuRuntime(Runtime):
    """The `Runtime` of TorchTPU."""

    name = "TorchTPU"
    plans_shapes = True

    def __init__(self) -> None:
        """Name the device to accelerate, which would take the CPU, and let float32 products be that.

        TorchTPU's default, unlike torch's, rounds their factors to bfloat16: but that is what `bf16` says. Several
        processes meet, for host tensors too.
        """
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "tpu")
        torch.set_float32_matmul_precision("highest")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,tpu:tpu_dist", timeout=PATIENCE)

    @property
    def device(self) -> torch.device:
        return torch.device("tpu")

    def _device_name(self) -> str:
        return f"{torch.get_device_module('tpu').get_device_name()} through TorchTPU"

    @contextmanager
    def known_to_accelerate(self) -> Iterator[None]:
        """Let accelerate count the processes as those of CPUs: of TPUs it knows one. Their device it is told."""
        if dist.is_initialized():
            os.environ[CPU] = "1"  # not for longer, as it is also how a user asks for the CPU
        try:
            yield
        finally:
            os.environ.pop(CPU, None)

    def settle_arguments(self, args: Any) -> None:
        args.dataloader_pin_memory = False  # what batches have is small, and not every host can
        args.logging_nan_inf_filter = False  # it would read the loss in every step; see `nonfinite_limit`
        if args.bf16 is None:
            args.bf16 = not args.fp16

    def chip(self) -> str | None:
        name = torch.get_device_module("tpu").get_device_name().removeprefix("TPU").strip().lower()
        return {"v5e": "v5litepod"}.get(name, name) or None

    def most_memory(self, device: torch.device) -> int | None:
        return torch.accelerator.max_memory_allocated(device) or None

    def compile_count(self) -> int:
        return torch.get_device_module("tpu")._get_cache_misses()

    def fuse(self, optimizer: Optimizer) -> None:
        """Let Adam be one kernel, where each of its operations would be compiled for each shape of a parameter.

        One that was told how to step keeps to that, and other optimizers have no such kernel.
        """
        if isinstance(optimizer, Adam) and optimizer.defaults["fused"] is None and not optimizer.defaults["foreach"]:
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings["fused"] = True
            optimizer.register_step_pre_hook(_leave_empty_parts_out)

    def skip_update_unless(self, is_finite: torch.Tensor, optimizer: Any) -> None:
        if isinstance(optimizer, Adam) and all(group["fused"] for group in optimizer.param_groups):
            optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]  # what a loss scale tells such a kernel
        else:
            super().skip_update_unless(is_finite, optimizer)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(function)


def _leave_empty_parts_out(optimizer: Optimizer, *_: object) -> None:
    """Let the kernel have no parameter of which this process has nothing, as of a score head's one row: only count.

    torch_tpu 0.2 loses the buffers of such a part, and the next step fails.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and parameter.grad is not None and not parameter.to_local().numel():
            parameter.grad = None
            state["step"] += 1 - getattr(optimizer, "found_inf", 0.0)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    program = torch.compile(function, backend="tpu", dynamic=False)
    return torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES)(program)
