"""A training loop of one's own on XLA devices: the trainer's losses, and no more programs than shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_loop
import pytest


@pytest.mark.eight
def test_it_compiles_nothing_more_once_it_has_evaluated(
    config: Callable[..., Any], model_folder: str, tmp_path: Path
) -> None:
    """Two shapes; on one device some batches take several micro-batches."""
    compiled = own_loop.compare(config, model_folder, tmp_path)
    assert compiled[4] - compiled[0] <= 1 and len(set(compiled[5:])) == 1
