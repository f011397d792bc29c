"""One of COUNT processes on TorchTPU, each with a CPU plugin of its own: torchtpu_ranks.py MODEL FOLDER COUNT RANK

It writes to FOLDER what `ranks.py` writes of some ways to train.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torchtpu_start  # before all that looks for a device
import tpu_dist_on_gloo

WAYS = {"left out": ("plain", None), "fsdp=2": ("plain", "fsdp=2"), "padded": ("padded", "fsdp=2")}


def main(model: str, folder: Path, count: str, rank: str) -> None:
    import ranks  # which chooses a device

    torch.zeros(1, device="tpu").cpu()  # starts the plugin, which does not know that there are several
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    if "NODON" in os.environ:
        from torch_tpu._internal import execution_mode
        execution_mode.disable_inplace_buffer_donation = True
        print("NODON", execution_mode.disable_inplace_buffer_donation)
    found = {name: ranks.train(model, folder / name, way, mesh) for name, (way, mesh) in WAYS.items() if name in os.environ.get("ONLY_WAYS", name).split(";")}
    (folder / f"tpu {rank} of {count}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    assert torchtpu_start and tpu_dist_on_gloo
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
