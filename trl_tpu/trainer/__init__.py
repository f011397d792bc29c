"""The public API, at TRL's own module paths."""

import importlib
from typing import Any

_NAMES = ("ModelConfig", "RewardConfig", "RewardTrainer", "get_peft_config", "get_quantization_config")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module("trl_tpu"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
