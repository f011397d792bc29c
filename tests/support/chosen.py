"""Which cases of a test file a run has chosen: what they have in common is made for those alone, some at a time."""

import os
from typing import Any

import pytest

AT_ONCE = min(4, os.cpu_count() or 1)
"""Processes at a time that trace and compile. Each needs a GB of memory."""


def chosen(request: pytest.FixtureRequest, parameter: str, *more: str) -> list[Any]:
    """Return the values of a parameter in the tests of the fixture's file that will run, each once, in their order.

    Of several parameters return the tuples of their values.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    cases = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    names = (parameter, *more)
    found = [tuple(case[name] for name in names) for case in cases if set(names) <= case.keys()]
    return list(dict.fromkeys(found if more else (value for (value,) in found)))
