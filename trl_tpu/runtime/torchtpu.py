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

from .base import PATIENCE
from .device_choice import CPU
from .native import Runtime

# that one function is compiled for; torch's own limit, of 8, is meant for code that varies by chance
_MOST_SHAPES = 256


class TorchTpuRuntime(Runtime):
    """The `Runtime` of TorchTPU."""

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

    def chip(self) -> str | None:
        name = torch.get_device_module("tpu").get_device_name().removeprefix("TPU").strip().lower()
        return {"v5e": "v5litepod"}.get(name, name) or None

    def most_memory(self, device: torch.device) -> int | None:
        return torch.accelerator.max_memory_allocated(device) or None

    def compile_count(self) -> int:
        return torch.get_device_module("tpu")._get_cache_misses()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    program = torch.compile(function, backend="tpu", dynamic=False)
    return torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES)(program)
