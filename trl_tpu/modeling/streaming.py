"""Weights straight from a checkpoint to their devices, one at a time, while transformers reads it.

transformers builds a model without memory, then reads, renames, converts and sets its parameters one after the other.
torch's registration hooks see each being set, so a function can take its place there: no host holds the whole model.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import modeling_utils

#: Given the model, a parameter's name and its value on the host: the value on the device.
Place = Callable[[Any, str, torch.Tensor], torch.Tensor]


@contextmanager
def placing(place: Place) -> Iterator[None]:
    """Let ``from_pretrained``, meanwhile, hand every weight that it has read to ``place`` and keep what that returns.

    What the checkpoint lacks (a new reward head) is initialized on the host as ever and stays there.

    This hangs on three of transformers' private ways: it opens files by `modeling_utils.safe_open`, it reads ahead
    unless ``HF_DEACTIVATE_ASYNC_LOAD`` is set, and it marks what it has read by ``_is_hf_initialized``. Where one
    changes, weights stay on the host, or hosts need more memory: the tests of streaming see either.
    """
    parents: dict[nn.Module, tuple[nn.Module, str]] = {}

    def note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None:
            parents[submodule] = (module, name)

    def take(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # transformers marks what it has read, so that it does not initialize it
        if parameter is None or parameter.device.type != "cpu" or not getattr(parameter, "_is_hf_initialized", False):
            return None
        path = [name]
        while module in parents:
            module, part = parents[module]
            path.insert(0, part)
        placed = nn.Parameter(place(module, ".".join(path), parameter.detach()), parameter.requires_grad)
        placed._is_hf_initialized = True  # type: ignore[attr-defined]
        return placed

    hooks = (
        register_module_module_registration_hook(note),
        register_module_parameter_registration_hook(take),  # type: ignore[arg-type]  # typed as returning nothing
    )
    # transformers would otherwise read ahead in threads, as fast as it can
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    setattr(modeling_utils, "safe_open", _Unmapped)  # noqa: B010  # typed as a class
    try:
        yield
    finally:
        setattr(modeling_utils, "safe_open", safe_open)  # noqa: B010
        for hook in hooks:
            hook.remove()
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


class _Unmapped:
    """An open file whose tensors are read when they are asked for; transformers does that on Windows alone.

    Elsewhere it maps all files until the end, and what was read of them stays in the process's resident memory.
    """

    def __init__(self, path: Any, **options: Any) -> None:
        self._file = safe_open(path, **options | {"backend": "pread"})

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_slice(self, name: str) -> "_Whole":
        return _Whole(self._file, name)

    def __enter__(self) -> "_Unmapped":
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class _Whole:
    """A tensor in a file that is read as a whole, for which safetensors takes half the memory that a slice takes."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._file.get_slice(self._name), attribute)
