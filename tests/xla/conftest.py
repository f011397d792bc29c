"""Tests on PyTorch/XLA in a process with one XLA device: programs, their number and their results.

Tests marked `eight` check something different on eight devices, so they run there, too.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import subprocesses

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On eight devices, deselect tests that are not marked `eight`."""
    here = [item for item in items if item.path.is_relative_to(FOLDER)]
    if int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1:
        left_out = [item for item in here if item.get_closest_marker("eight") is None]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def take_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Return a function that takes the steps of `remat_programs.py` in a subprocess, which dumps its programs."""

    def take(runs: Sequence[str]) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("steps") / "out.json"
        subprocesses.run("remat_programs.py", str(out), *runs)
        return json.loads(out.read_text())

    return take
