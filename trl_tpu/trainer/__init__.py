"""The public API, at TRL's own module paths; names are imported when they are first used."""

import importlib
from typing import Any

_MODULE_OF = {
    "DataCollatorForPreference": ".reward_trainer",
    "ModelConfig": ".model_config",
    "RewardConfig": ".reward_config",
    "RewardDataCollatorWithPadding": ".utils",
    "RewardTrainer": ".reward_trainer",
    "compute_accuracy": ".utils",
    "disable_dropout_in_model": ".utils",
    "get_kbit_device_map": "..modeling.adapters",
    "get_peft_config": "..modeling.adapters",
    "get_quantization_config": "..modeling.adapters",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
