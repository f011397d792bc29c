"""Reward-model training on PyTorch/XLA, with the API of TRL's RewardTrainer.

Names are imported when they are first used, so that importing the package is quick and touches no device.
"""

import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import old_paths
from .runtime.device_choice import settle

try:
    __version__ = version("trl-tpu")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

# XLA's compiler writes warnings to stderr, from C++, at every compile. It reads this once, when torch_xla is imported,
# which transformers does: so it has to be said here.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

settle()  # the device, since transformers and accelerate choose theirs when they are imported

old_paths.install()

_MODULES = {
    "chat_template_utils": ["clone_chat_template"],
    "config.removed_arguments": ["TrainingArguments"],
    "data_utils": [
        "apply_chat_template",
        "extract_prompt",
        "is_conversational",
        "is_conversational_from_value",
        "maybe_apply_chat_template",
        "maybe_convert_to_chatml",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "unpair_preference_dataset",
    ],
    "import_utils": ["is_xpu_available"],  # an old path
    "modeling.adapters": ["get_kbit_device_map", "get_peft_config", "get_quantization_config"],
    "modeling.chat_template": ["setup_chat_format"],
    "scoring.stream": ["score"],
    "scripts.utils": ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset", "init_zero_verbose"],
    "trainer.model_config": ["ModelConfig"],
    "trainer.reward_config": ["RewardConfig"],
    "trainer.reward_trainer": ["RewardTrainer"],
    "trainer.utils": ["RewardDataCollatorWithPadding"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
