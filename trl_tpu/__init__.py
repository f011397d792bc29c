"""Reward-model training on CPUs, GPUs and TPUs, with the API of TRL's RewardTrainer.

Names are imported on first use: importing the package is fast and touches no device.
"""

import importlib.util
import logging
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from .runtime.device_choice import settle

try:
    __version__ = version("trl-tpu")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

# XLA's compiler prints C++ warnings to stderr at every compile. It reads this variable once, on import of torch_xla.
# transformers imports torch_xla, so set the variable before any import of transformers.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

if int(os.environ.get("LOCAL_RANK", 0)) > 0:  # the first process of a host warns of the same
    logging.getLogger(__name__).setLevel(logging.ERROR)
settle()  # choose the device now: transformers and accelerate choose theirs on import

_MODULES = {
    "compat.old_trl": ["setup_chat_format"],
    "data_utils": ["apply_chat_template", "is_conversational", "maybe_apply_chat_template"],
    "data.formats": ["extract_prompt", "maybe_extract_prompt"],
    "compat.arguments": ["TrainingArguments"],
    "modeling.adapters": ["get_kbit_device_map", "get_peft_config", "get_quantization_config"],
    "modeling.load": ["clone_chat_template"],
    "scoring.stream": ["score"],
    "scripts.utils": ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset", "init_zero_verbose"],
    "trainer.model_config": ["ModelConfig"],
    "trainer.reward_config": ["RewardConfig"],
    "trainer.reward_trainer": ["RewardTrainer"],
    "trainer.step": ["TrainState", "evaluation_step", "training_step"],
    "trainer.utils": ["RewardDataCollatorWithPadding", "is_xpu_available"],
}
# names that scripts import from TRL's current or former modules: see `_OLD_PATHS`
_OLD_NAMES = {"RewardScriptArguments": "scripts.utils", "conversations_formatting_function": "data.formats"}
_OLD_NAMES |= {"DataCollatorForPreference": "data.trl_dict", "disable_dropout_in_model": "modeling.load"}
_OLD_NAMES |= {"_BaseTrainer": "trainer.base_trainer", "compute_accuracy": "trainer.utils", "print_env": "cli"}
_OLD_NAMES |= {"get_act_offloading_ctx_manager": "trainer.utils", "is_peft_available": "trainer.utils"}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def _get_public(name: str) -> Any:
    """Return a name of the public API, for this package and for the modules at TRL's paths."""
    module = (_MODULE_OF | _OLD_NAMES).get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f".{name}", __name__)  # `import trl_tpu; trl_tpu.models`
    return _get_public(name)


def __dir__() -> list[str]:
    return __all__


#: TRL's current and former modules below the package. Every public name can be imported from each of them.
_OLD_PATHS = (
    *("chat_template_utils", "commands", "commands.cli_utils", "extras", "extras.dataset_formatting"),
    *("import_utils", "models", "models.activation_offloading", "models.utils", "scripts.env"),
    *("trainer.base_config", "trainer.callbacks", "trainer.training_configs"),
)


class _OldPaths(MetaPathFinder, Loader):
    """Finder and loader for the modules at `_OLD_PATHS`."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        package, _dot, path = name.partition(".")
        return ModuleSpec(name, self, is_package=True) if package == __name__ and path in _OLD_PATHS else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _get_public  # type: ignore[method-assign]


sys.meta_path.append(_OldPaths())
