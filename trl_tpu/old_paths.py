"""Where names of older versions of TRL are now, so that a script finds them at their path of then.

``from trl_tpu.extras.dataset_formatting import conversations_formatting_function`` works as TRL's did, though the
module is gone. What was there and has nothing to do with rewards comes from the installed TRL, if it still has it.
"""

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_FORMATS = "trl_tpu.data.formats"
_CHAT = "trl_tpu.modeling.chat_template"
_SCRIPTS = "trl_tpu.scripts.utils"
_AVAILABLE = "transformers.utils"

#: Modules that TRL had, and of each the names that are elsewhere now: the module, and the name there.
OLD_PATHS: dict[str, dict[str, tuple[str, str]]] = {
    "commands": {},
    "commands.cli_utils": {
        "RewardScriptArguments": (_SCRIPTS, "ScriptArguments"),
        "ScriptArguments": (_SCRIPTS, "ScriptArguments"),
        "TrlParser": (_SCRIPTS, "TrlParser"),
        "init_zero_verbose": (_SCRIPTS, "init_zero_verbose"),
    },
    "extras": {},
    "extras.dataset_formatting": {
        "conversations_formatting_function": (_FORMATS, "conversations_formatting_function"),
    },
    "import_utils": {
        "is_peft_available": (_AVAILABLE, "is_peft_available"),
        "is_xpu_available": (_AVAILABLE, "is_torch_xpu_available"),
    },
    "models": {
        "setup_chat_format": (_CHAT, "setup_chat_format"),
        "clone_chat_template": (_CHAT, "clone_chat_template"),
    },
    "models.utils": {"setup_chat_format": (_CHAT, "setup_chat_format")},
    "trainer.callbacks": {},
}


class OldPaths(MetaPathFinder, Loader):
    """Finds the modules of `OLD_PATHS`, below the names of some packages."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        is_here = package in self._packages and old in OLD_PATHS
        return spec_from_loader(name, self, is_package=True) if is_here else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = partial(_name_of_then, module.__name__)  # type: ignore[method-assign]


def _name_of_then(module_name: str, name: str) -> Any:
    package, _, path = module_name.partition(".")
    if name in OLD_PATHS[path]:
        module, today = OLD_PATHS[path][name]
        return getattr(importlib.import_module(module), today)
    if package != "trl" and not name.startswith("__"):
        try:
            return getattr(importlib.import_module(f"trl.{path}"), name)
        except (ImportError, AttributeError):
            pass
    raise AttributeError(
        f"trl_tpu.{path} has no {name!r}, nor has an installed TRL. Import it from where it is today."
    )


def install() -> None:
    """Let old paths below this package be imported."""
    sys.meta_path.append(OldPaths("trl_tpu"))
