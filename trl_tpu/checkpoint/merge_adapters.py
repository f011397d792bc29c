"""Adapters merged into a base model of which only one module is in memory at a time."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

#: Takes a merged tensor under its name in the model without adapters.
Put = Callable[[str, torch.Tensor], None]

# how peft names what it wraps, and what it puts in its place
_WRAPPED = re.compile(r"(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)\.")


class Merger:
    """Merges a base model's weights, as they come, with adapters, in float32, and hands on the results and the rest.

    A module's weights wait for each other; then peft itself merges the module, whatever its kind of adapter.

    Args:
        adapted: The model with its adapters: these are in memory, the base is on the meta device.
        plain: The model without adapters, on the meta device.
        put: Gets each tensor of the merged model: in float32 if it was merged, else as it came.
    """

    def __init__(self, adapted: Any, plain: PreTrainedModel, put: Put) -> None:
        adapted.float()
        base: nn.Module = adapted.get_base_model()
        self._put = put
        self._shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
        self._modules = dict(_tuned_modules(base))
        self._path_of = {
            f"{path}.{name}": path for path in self._modules for name in plain.get_submodule(path).state_dict()
        }
        in_memory = {name: tensor for name, tensor in base.state_dict().items() if not tensor.is_meta}
        self._done = {name for name in in_memory if name in self._shapes and name not in self._path_of}
        for name in sorted(self._done):  # biases, say, that were trained beside the adapters
            put(name, in_memory[name])
        for path in list(self._modules):  # modules that were trained whole need nothing of the base
            self._merge_if_complete(path)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """A weight of the base, by its name in the model without adapters.

        Raises:
            ValueError: It has another shape than in the model that the adapters are for.
        """
        if name in self._done or name not in self._shapes:
            return
        path = self._path_of.get(name)
        if path is None:
            self._check(name, tensor)
            self._put(name, tensor)
            self._done.add(name)
            return
        module = self._modules[path]
        slots = [slot for slot, parameter in _by_own_name(module, path, name) if parameter.is_meta]
        if slots:
            self._check(name, tensor)
        for slot in slots:
            owner, _, attribute = slot.rpartition(".")
            # a copy: merging adds to it
            value = nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False)
            setattr(module.get_submodule(owner), attribute, value)
        self._merge_if_complete(path)

    def missing(self) -> list[str]:
        """What the merged model lacks so far."""
        return sorted(self._shapes.keys() - self._done)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.shape != self._shapes[name]:
            raise ValueError(
                f"{name} of the base model is of shape {list(tensor.shape)}, and the adapters were trained on "
                f"{list(self._shapes[name])}. Give the base that they were trained on (`--base`), with its vocabulary "
                "extended by the tokens that training added."
            )

    def _merge_if_complete(self, path: str) -> None:
        names = [name for name, of in self._path_of.items() if of == path]
        module = self._modules[path]
        for name in names:
            if all(parameter.is_meta for _, parameter in _by_own_name(module, path, name)):
                return
        merged = _merged(module).state_dict()
        for name in names:
            self._put(name, merged[name.removeprefix(f"{path}.")])
        self._done.update(names)
        module.to("meta")


def _tuned_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, Any]]:
    """The modules of peft in a model, the outermost ones, and where they are."""
    for name, module in model.named_children():
        where = f"{path}.{name}" if path else name
        if hasattr(module, "unload_and_optionally_merge_module") or (
            hasattr(module, "base_layer") and hasattr(module, "merge")
        ):
            yield where, module
        else:
            yield from _tuned_modules(module, where)


def _by_own_name(module: nn.Module, path: str, name: str) -> list[tuple[str, nn.Parameter]]:
    """The parameters of one of peft's modules that stand for ``name`` in the model without adapters."""
    wanted = name.removeprefix(f"{path}.")
    parameters = module.named_parameters(remove_duplicate=False)
    return [(slot, parameter) for slot, parameter in parameters if _WRAPPED.sub("", slot) == wanted]


def _merged(module: Any) -> nn.Module:
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    module.merge()
    return module.get_base_layer()
