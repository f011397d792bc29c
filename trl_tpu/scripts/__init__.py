"""The main jobs, one a file, and what their command lines share."""

import importlib
from typing import Any

#: How names begin that stand for a model or a dataset made on the spot: ``synthetic:NAME``.
SYNTHETIC = "synthetic:"

_NAMES = ("DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset", "init_zero_verbose")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module("trl_tpu"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
