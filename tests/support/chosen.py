"""Which cases of a test file a run has chosen: what they have in common is made for those alone."""

from typing import Any

import pytest


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter in the tests of the fixture's file that will run, each once, in their order."""
    tests = [item for item in request.session.items if item.path == request.path]
    cases = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    return list(dict.fromkeys(case[parameter] for case in cases if parameter in case))
