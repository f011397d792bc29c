"""Load a checkpoint onto the devices of this process and write the host memory this took: run by a test.

python tests/support/host_memory.py MODEL OUT

Shards of virtual devices are also in host memory, so they are subtracted.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch_xla
from environment import private_bytes, return_freed_memory
from transformers.utils import logging

from trl_tpu.modeling.load import load_model
from trl_tpu.parallel.mesh import parse_mesh
from trl_tpu.parallel.shard import place_model, plan_model
from trl_tpu.runtime import PartitionSpec, current
from trl_tpu.runtime.xla import XlaRuntime


class MemoryRecorder(XlaRuntime):
    """Records host memory without the devices' shards, before and after the placement of each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        gc.collect()
        self.held: list[int] = []
        self.placed = 0
        self.before = private_bytes()

    def place(self, tensor: torch.Tensor, axes: PartitionSpec, device: torch.device) -> torch.Tensor:
        if tensor.device.type == "xla":
            return super().place(tensor, axes, device)
        self._note()
        result = super().place(tensor, axes, device)
        copies = 1 if any(axes) else current().topology().devices
        self.placed += copies * tensor.numel() * tensor.element_size()
        self._note()
        return result

    def _note(self) -> None:
        """Record host memory. A large increase counts only if it remains after pending transfers had time to end."""
        most, end = max(self.held, default=0) + 2**20, time.monotonic() + 0.2
        while (held := private_bytes() - self.before - self.placed) > most and time.monotonic() < end:
            time.sleep(0.01)
        self.held.append(held)


def main(model: str, out: str) -> None:
    return_freed_memory()
    logging.disable_progress_bar()
    mesh = parse_mesh("fsdp=4,tensor=2", current().topology().devices)
    runtime = MemoryRecorder()
    runtime.set_mesh(mesh.sizes, mesh.slices)
    device = torch_xla.device()
    # imports and allocations of the first transfer and the first sharding annotation (jax, if installed) do not count
    placed = runtime.place(torch.zeros(8), (None,), device)
    runtime.place(placed, (None,), device)
    runtime.begin()
    loaded = load_model(model, in_files=True)
    place_model(loaded, plan_model(loaded, mesh), runtime, device)
    sizes = [parameter.numel() * parameter.element_size() for parameter in loaded.parameters()]
    Path(out).write_text(json.dumps({"held": max(runtime.held), "model": sum(sizes), "largest": max(sizes)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
