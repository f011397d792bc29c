"""Reward-model training on PyTorch/XLA, with the API of TRL's RewardTrainer.

Names are imported when they are first used, so that importing the package is quick and touches no device.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .runtime.device_choice import settle

try:
    __version__ = version("trl-tpu")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

# XLA's compiler writes warnings to stderr, from C++, at every compile. It reads this once, when torch_xla is imported,
# which transformers does: so it has to be said here.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

settle()  # the device, since transformers and accelerate choose theirs when they are imported

_MODULES = {
    "data_utils": ["apply_chat_template", "is_conversational", "maybe_apply_chat_template"],
    "data.chat_templates": ["extract_prompt", "maybe_extract_prompt"],
    "config.checks": ["TrainingArguments"],
    "modeling.adapters": ["get_kbit_device_map", "get_peft_config", "get_quantization_config"],
    "modeling.load": ["clone_chat_template", "setup_chat_format"],
    "scoring.stream": ["score"],
    "scripts.utils": ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset", "init_zero_verbose"],
    "trainer.model_config": ["ModelConfig"],
    "trainer.reward_config": ["RewardConfig"],
    "trainer.reward_trainer": ["RewardTrainer"],
    "trainer.utils": ["RewardDataCollatorWithPadding", "is_xpu_available"],
}
# names that scripts import from where TRL has or had them: see `_OLD_PATHS`
_OLD_NAMES = {"RewardScriptArguments": "scripts.utils", "conversations_formatting_function": "data.chat_templates"}
_OLD_NAMES |= {"DataCollatorForPreference": "data.collators", "disable_dropout_in_model": "modeling.layers"}
_OLD_NAMES |= dict.fromkeys(
    ("compute_accuracy", "get_act_offloading_ctx_manager", "is_peft_available"), "trainer.utils"
)
_OLD_NAMES |= {"_BaseTrainer": "trainer.base_trainer"}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    module = (_MODULE_OF | _OLD_NAMES).get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


#: Modules that TRL has or had; at each of these paths there is every name of this package.
_OLD_PATHS = (
    *("chat_template_utils", "commands", "commands.cli_utils", "extras", "extras.dataset_formatting"),
    *("import_utils", "models", "models.utils"),
)
for _path in _OLD_PATHS:
    _parent, _, _leaf = f"{__name__}.{_path}".rpartition(".")
    _module = importlib.util.module_from_spec(ModuleSpec(f"{_parent}.{_leaf}", None, is_package=True))
    _module.__getattr__ = __getattr__  # type: ignore[method-assign]
    sys.modules[_module.__name__] = _module
    setattr(sys.modules[_parent], _leaf, _module)
