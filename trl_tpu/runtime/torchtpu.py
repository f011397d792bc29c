"""TorchTPU: TPUs as torch's own accelerator, one process a device, operations that run one by one as on a GPU.

Each operation is a program, compiled anew for each shape; `Runtime.compiled` makes one of many.

References: https://docs.cloud.google.com/tpu/docs/pytorch-tpu
"""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ..errors import UserError
from .base import Topology
from .native import Runtime

# that one function is compiled for; torch's own limit, of 8, is meant for code that varies by chance
_MOST_SHAPES = 256


class TorchTpuRuntime(Runtime):
    """The `Runtime` of TorchTPU."""

    name = "torchtpu"
    plans_shapes = True

    def __init__(self) -> None:
        """Name the device to accelerate, which would take the CPU, and let float32 products be that.

        TorchTPU's default, unlike torch's, rounds their factors to bfloat16: but that is what `bf16` says.

        Raises:
            UserError: There are several processes.
        """
        if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise UserError(
                f"This is one of {processes} processes on TorchTPU, whose groups accelerate does not know: it would "
                "take each for the only one, and all would write the same files. Start one process, for one chip."
            )
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "tpu")
        torch.set_float32_matmul_precision("highest")

    @property
    def device(self) -> torch.device:
        return torch.device("tpu")

    def topology(self) -> Topology:
        device = torch.get_device_module("tpu").get_device_name()
        return Topology(1, slices=1, process_index=0, process_count=1, description=f"{device} through TorchTPU")

    def chip(self) -> str | None:
        name = torch.get_device_module("tpu").get_device_name().removeprefix("TPU").strip().lower()
        return {"v5e": "v5litepod"}.get(name, name) or None

    def most_memory(self, device: torch.device) -> int | None:
        return torch.accelerator.max_memory_allocated(device) or None

    def compile_count(self) -> int:
        return torch.get_device_module("tpu")._get_cache_misses()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_call_compiled, _compiled(function))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="tpu", dynamic=False)


def _call_compiled(program: Callable[..., Any], *args: Any) -> Any:
    with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
        return program(*args)
