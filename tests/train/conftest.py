"""Fixtures for tests that train in plain torch (USE_TORCH_XLA=0).

What they need is imported in them: the process that hands out tests reads this file, too, and would import torch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from old_pairs import Old


@pytest.fixture(scope="session")
def made_old() -> Old:
    from old_pairs import make_old

    return make_old()


@pytest.fixture
def old(made_old: Old) -> Old:
    """What an old script has before it makes a trainer; fresh copies, since a trainer writes into its model."""
    return made_old._replace(model=copy.deepcopy(made_old.model), tokenizer=copy.deepcopy(made_old.tokenizer))
