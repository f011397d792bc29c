"""Attention of expanded rows, by any causal kernel that takes segments, is taken by the TPU's compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_tpu.preflight.compile import WITHOUT_A_TPU


@pytest.mark.parametrize(("kernel", "kernels"), [("flash", 3), ("splash", 2)])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_forward_and_backward_compile(topology: str, kernel: str, kernels: int) -> None:
    """jax's flash attention has two kernels in the backward, for queries and for keys; ours has one."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kernels.py")), topology, kernel, "2048"],
        env=os.environ | WITHOUT_A_TPU,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == f"kernels: {kernels}"
