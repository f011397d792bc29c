"""Runs a script as one of several processes on TorchTPU, each with a CPU plugin of its own, which meet over gloo.

python tests/support/torchtpu_ranks.py SCRIPT WORDS...
"""

import runpy
import sys
from pathlib import Path

import torch
import torchtpu_start
import tpu_dist_on_gloo

if __name__ == "__main__":
    assert torchtpu_start and tpu_dist_on_gloo
    torch.set_num_threads(1)
    torch.zeros(1, device="tpu").cpu()  # starts the plugin, before the script says that there are several processes
    sys.argv = [str(Path(__file__).with_name(sys.argv[1])), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
