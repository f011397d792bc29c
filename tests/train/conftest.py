"""Fixtures for tests that train in plain torch (USE_TORCH_XLA=0)."""

import copy

import pytest
from old_pairs import Old, make_old


@pytest.fixture(scope="session")
def made_old() -> Old:
    return make_old()


@pytest.fixture
def old(made_old: Old) -> Old:
    """What an old script has before it makes a trainer; fresh copies, since a trainer writes into its model."""
    return made_old._replace(model=copy.deepcopy(made_old.model), tokenizer=copy.deepcopy(made_old.tokenizer))
