"""The commands' scripts, one per module, and their shared arguments; as in TRL, these can be imported from here."""

from typing import Any

from .. import _MODULES, _get_public


def __getattr__(name: str) -> Any:
    if name in _MODULES["scripts.utils"]:  # not `score`: it is a function in the package, but a module here
        return _get_public(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
