"""Fixtures for tests that train in plain torch (USE_TORCH_XLA=0)."""

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # the modules that tests share

from old_pairs import Old, make_old  # noqa: E402


@pytest.fixture(scope="session")
def made_old() -> Old:
    return make_old()


@pytest.fixture
def old(made_old: Old) -> Old:
    """What an old script has before it makes a trainer; fresh copies, since a trainer writes into its model."""
    return made_old._replace(model=copy.deepcopy(made_old.model), tokenizer=copy.deepcopy(made_old.tokenizer))
