"""Processes that trace and compile take long and use one core each, so tests have their work begun ahead."""

import os
from typing import Any

import pytest

AT_ONCE = min(4, os.cpu_count() or 1)
"""Processes at a time. Each needs a GB of memory."""


def asked_for(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """The values of parameters in those tests of a module that are to be run, each combination once."""
    params = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(tuple(each[name] for name in names) for each in params if set(names) <= set(each)))
