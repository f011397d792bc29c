"""Read a checkpoint onto the devices of this process and write how much of it the host held: run by a test.

python tests/support/host_memory.py MODEL OUT {streamed,whole}

"streamed" places weights as they are read; "whole" reads the model to the host first. On virtual devices the shards
are in the host's memory too, so they are taken off.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch_xla
from allocator import give_back_at_once, private_bytes
from transformers.utils import logging

from trl_tpu.modeling.load import load_model
from trl_tpu.parallel.mesh import parse_mesh
from trl_tpu.parallel.shard import place_model, plan_model
from trl_tpu.runtime import PartitionSpec, current
from trl_tpu.runtime.xla import XlaRuntime


class LengthStats(XlaRuntime):
    """Notes what the host holds beside the devices' shards, before and after each tensor goes."""

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
        """Note what is held; much more than before only if it still is when transfers have had time to end."""
        most, end = max(self.held, default=0) + 2**20, time.monotonic() + 0.2
        while (held := private_bytes() - self.before - self.placed) > most and time.monotonic() < end:
            time.sleep(0.01)
        self.held.append(held)


def main(model: str, out: str, way: str) -> None:
    give_back_at_once()
    logging.disable_progress_bar()
    mesh = parse_mesh("fsdp=4,tensor=2", current().topology().devices)
    runtime = LengthStats()
    runtime.set_mesh(mesh.sizes, mesh.slices)
    device = torch_xla.device()
    # what the first transfer and the first mark on a device's tensor start or import (jax, if it is installed) is not
    # the weights'
    placed = runtime.place(torch.zeros(8), (None,), device)
    runtime.place(placed, (None,), device)
    runtime.begin()
    loaded = load_model(model, in_files=way == "streamed")
    place_model(loaded, plan_model(loaded, mesh), runtime, device)
    sizes = [parameter.numel() * parameter.element_size() for parameter in loaded.parameters()]
    Path(out).write_text(json.dumps({"held": max(runtime.held), "model": sum(sizes), "largest": max(sizes)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
