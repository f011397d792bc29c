"""The fixtures of every test on PyTorch/XLA."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from device_fixtures import config, model_folder
from places import ROOT, SUPPORT


@pytest.fixture(scope="session")
def steps_apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Takes the steps of `remat_programs` in a process of its own, which has its programs written down."""

    def take(runs: Sequence[str]) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("steps") / "out.json"
        process = subprocess.run(
            [sys.executable, str(SUPPORT / "remat_programs.py"), str(out), *runs],
            env=os.environ | {"CPU_NUM_DEVICES": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return json.loads(out.read_text())

    return take


__all__ = ["config", "model_folder", "steps_apart"]
