"""TorchTPU: TPUs as torch's accelerator, with one process per device and eager operations as on a GPU.

Each operation is a program, compiled once per shape. `Runtime.compiled` fuses many operations into one program.

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
from .native import COLLECTIVE_TIMEOUT, Runtime, set_tpu_arguments

# Shapes that one function may be compiled for. torch's default of 8 is meant to detect code with changing shapes.
_RECOMPILE_LIMIT = 256


class TorchTpuRuntime(Runtime):
    """The `Runtime` of TorchTPU."""

    name = "TorchTPU"
    plans_shapes = True

    def __init__(self) -> None:
        """Select the TPU in accelerate, set float32 precision, and start the process group of several processes.

        Without ACCELERATE_TORCH_DEVICE, accelerate would use the CPU. TorchTPU's default rounds the factors of float32
        products to bfloat16, unlike torch's default, but only `bf16` should choose that. The process group supports
        device and host tensors.
        """
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "tpu")
        self.use_exact_products()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,tpu:tpu_dist", timeout=COLLECTIVE_TIMEOUT)

    @property
    def device(self) -> torch.device:
        return torch.device("tpu")

    def _device_name(self) -> str:
        return f"{torch.get_device_module('tpu').get_device_name()} through TorchTPU"

    @contextmanager
    def accelerate_context(self) -> Iterator[None]:
        """Let accelerate count processes as on CPUs: on TPUs it expects one process. `__init__` sets its device."""
        if dist.is_initialized():
            os.environ[CPU] = "1"  # only within the context: users set the variable to choose the CPU
        try:
            yield
        finally:
            os.environ.pop(CPU, None)

    def set_device_arguments(self, args: Any) -> None:
        set_tpu_arguments(args)
        args.logging_nan_inf_filter = False  # it would read the loss at every step; see `nonfinite_limit`

    def chip(self) -> str | None:
        return torch.get_device_module("tpu").get_device_name().removeprefix("TPU").strip().lower() or None

    def peak_memory(self, device: torch.device) -> int | None:
        return torch.accelerator.max_memory_allocated(device) or None

    def compile_count(self) -> int:
        return torch.get_device_module("tpu")._get_cache_misses()

    def fuse(self, optimizer: Optimizer) -> None:
        """Let Adam use its fused kernel. Otherwise each of its operations is compiled for each parameter shape.

        An explicit setting of ``fused`` or ``foreach`` is kept. Other optimizers have no fused kernel.
        """
        if isinstance(optimizer, Adam) and optimizer.defaults["fused"] is None and not optimizer.defaults["foreach"]:
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings["fused"] = True
            optimizer.register_step_pre_hook(_skip_empty_shards)

    @staticmethod
    @cache
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        program = torch.compile(function, backend="tpu", dynamic=False)
        return torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT)(program)


def _skip_empty_shards(optimizer: Optimizer, *_: object) -> None:
    """Hide parameters with an empty local shard from the fused kernel, such as a score head's single row.

    Only their step count advances. torch_tpu 0.2 loses the buffers of empty shards, and the next step fails.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and parameter.grad is not None and not parameter.to_local().numel():
            parameter.grad = None
            state["step"] += 1 - getattr(optimizer, "found_inf", 0.0)
