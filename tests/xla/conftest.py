"""Tests on PyTorch/XLA, in a process with one XLA device: programs, their counts, and what they compute.

Those marked `eight` say something else on eight devices, so they run there too.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apart
import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out on eight devices what says nothing else there."""
    here = [item for item in items if item.path.is_relative_to(FOLDER)]
    if int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1:
        left_out = [item for item in here if item.get_closest_marker("eight") is None]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def steps_apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Takes the steps of `remat_programs` in a process of its own, which has its programs written down."""

    def take(runs: Sequence[str]) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("steps") / "out.json"
        apart.run("remat_programs.py", str(out), *runs)
        return json.loads(out.read_text())

    return take
