"""Finds what a user has changed in a model: packed rows are read past its own scoring, so it must be unmodified."""

import functools
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import UserError
from ..adapters import without_adapters
from ..score_head import find_score_head

# whose code a model may be made of: known not to look across the tokens of a row but through attention
_LIBRARIES = (
    *("torch", "transformers", "peft", "accelerate", "trl_tpu"),
    *("bitsandbytes", "deepspeed", "liger_kernel", "torch_xla", "torchao"),
)
# adapters that change each token's activations by themselves, whatever row it is in
_TOKEN_WISE_ADAPTERS = frozenset({"LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "VERA", "LN_TUNING"})


class PackingImpossible(UserError):
    """Packed rows cannot be used; the message says why."""


def check_unmodified(model: nn.Module) -> None:
    """Make sure that ``model`` computes rewards by its libraries' own code, with a linear head.

    Asked before training, and whenever batches are.

    Args:
        model: A sequence classifier, possibly with adapters.

    Raises:
        PackingImpossible: If a forward is somebody's own, on the class or on the instance, a hook is, the head is more
            than a linear layer, or adapters do more than change each token's activations.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.peft_type not in _TOKEN_WISE_ADAPTERS:
            kind = config.peft_type.value
            raise PackingImpossible(f"adapters of the kind {kind} may do more than change each token by itself")
    for name, module in model.named_modules():
        where = f"{type(module).__name__} ({name})" if name else type(module).__name__
        if not _is_of_a_library(module.forward):
            raise PackingImpossible(f"the forward of {where} is not a library's own, and packed rows would bypass it")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if not all(map(_is_of_a_library, hooks)):
            raise PackingImpossible(
                f"{where} has a forward hook of yours, which may read or change what is in padded rows"
            )
    base = without_adapters(model)
    head = find_score_head(base)
    if head is None:
        raise PackingImpossible(f"{type(base).__name__} has no `score` head")
    while not isinstance(head, nn.Linear):
        inner = getattr(head, "base_layer", None) or getattr(head, "original_module", None)
        if inner is None:
            raise PackingImpossible(f"the `score` head is a {type(head).__name__} instead of a linear layer")
        head = inner


def _is_of_a_library(function: Any) -> bool:
    """Tell whether a function is a library's code, and so is all that it wraps."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None and type(function).__module__.partition(".")[0] not in (*_LIBRARIES, "builtins"):
            return False
        if code is not None and not code.co_filename.startswith(_folders()):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@functools.cache
def _folders() -> tuple[str, ...]:
    specs = (find_spec(name) for name in _LIBRARIES)
    return tuple(f"{Path(spec.origin).parent}{os.sep}" for spec in specs if spec is not None and spec.origin)
