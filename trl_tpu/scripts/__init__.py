"""The main jobs, one a file, and what their command lines share; as in TRL, its names are here too."""

from typing import Any

from .. import _MODULES, _get_public


def __getattr__(name: str) -> Any:
    if name in _MODULES["scripts.utils"]:  # and not `score`, which is a function there and a module here
        return _get_public(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
