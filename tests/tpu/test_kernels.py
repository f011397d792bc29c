"""Attention of expanded rows, by any causal kernel that takes segments, is taken by the TPU's compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_tpu.preflight.compile import WITHOUT_A_TPU


def count_of_kernels(topology: str, kernel: str, rows: int, length: int) -> int:
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kernels.py")), topology, kernel, str(rows), str(length)],
        env=os.environ | WITHOUT_A_TPU,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return int(run.stdout.splitlines()[-1].removeprefix("kernels: "))


@pytest.mark.parametrize("kernel", ["flash", "splash"])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_forward_and_backward_compile(topology: str, kernel: str) -> None:
    """The backward has two kernels, for queries and for keys."""
    assert count_of_kernels(topology, kernel, 2, 2048) == 3


@pytest.mark.parametrize(("rows", "length", "kernels"), [(512, 2048, 3), (300, 2048, 6), (2, 131072, 3)])
def test_lists_of_blocks_fit_in_scalar_memory(rows: int, length: int, kernels: int) -> None:
    """Many rows, and long ones, are a loop over groups; rows that are left over have kernels of their own."""
    assert count_of_kernels("v5e:2x2", "splash", rows, length) == kernels
