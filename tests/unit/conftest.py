"""What several files of tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model that trains and scores: to be copied by whoever spoils it."""
    from bad_input import save_good_model  # imports torch, which the process that hands out tests does not need

    folder = tmp_path_factory.mktemp("good") / "model"
    save_good_model(folder)
    return folder
