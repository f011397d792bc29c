"""The GPU lane: see `check.py`."""

import json
import os
from dataclasses import asdict

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers would train on all GPUs at once

import torch

import tests.benchmarks  # noqa: F401  # sets variables, and makes `tests/support` importable
from trl_tpu.scripts.selfcheck import Line

#: Whether there is no GPU. All parts then run on the CPU, in small sizes.
IS_DRY = not torch.cuda.is_available()


def row(check: str, result: str, passed: bool | None = None) -> None:
    """Print a row of the table for `check.py`, on a line of its own also within pytest's dots."""
    print(f"\n{json.dumps(asdict(Line(check, result, passed)))}", flush=True)
