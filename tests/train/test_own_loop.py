"""A training loop of one's own has the trainer's losses in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_loop


def test_its_losses_are_the_trainers(config: Callable[..., Any], model_folder: str, tmp_path: Path) -> None:
    assert set(own_loop.compare(config, model_folder, tmp_path)) == {None}  # nothing compiles
