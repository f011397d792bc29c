"""A decoder's layers as one loop, so that compile time and program size do not grow with depth.

The model keeps its modules and the names of its parameters: only while the decoder runs does one module stand in the
place of its layers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..runtime import Axes, Remat, Runtime


class ScanImpossible(ValueError):
    """A model's layers cannot be a loop; the message says why."""


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the list of the decoder's layers, which are alike.

    Raises:
        ScanImpossible: If there is no one list of layers, they differ in more than the values of their parameters, or
            compute with random numbers or buffers.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 1
        and all(isinstance(each, GradientCheckpointingLayer) for each in module)
    ]
    if len(lists) != 1:
        found = ", ".join(name for name, _ in lists) or "none"
        raise ScanImpossible(
            f"scan_layers=True needs a model with one list of decoder layers, but {type(model).__name__} has {found}: "
            "leave it out."
        )
    name, layers = lists[0]
    first = dict(_features(layers[0]))
    for number, layer in enumerate(layers):
        other = dict(_features(layer))
        for key in [*first, *other]:
            if first.get(key) != other.get(key):
                raise ScanImpossible(
                    f"scan_layers=True needs layers that are all alike, but {name}.0 and {name}.{number} differ: "
                    f"{key} is {first.get(key)} and {other.get(key)}. Leave it out."
                )
    for key, value in first.items():
        if key.endswith(("dropout", "dropout.p", ".p")) and isinstance(value, float) and value > 0:
            raise ScanImpossible(
                f"scan_layers=True computes each layer twice, without the same random numbers, but {name}.0 has "
                f"{key}={value}: set it to 0."
            )
    if buffers := [buffer for buffer, _ in layers[0].named_buffers()]:
        raise ScanImpossible(
            f"scan_layers=True hands on parameters only, but {name}.0 has a buffer {buffers[0]}: leave it out."
        )
    return name, layers


def _features(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that tells what a layer computes, but for the values of its parameters."""
    for prefix, module in layer.named_modules():
        yield prefix, type(module).__qualname__
        for key, value in vars(module).items():
            if key != "layer_idx" and isinstance(value, bool | int | float | str | None):
                yield f"{prefix}.{key}".lstrip("."), value
    for key, parameter in layer.named_parameters():
        yield key, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)


def use_scan(model: Any, axes: Mapping[str, Axes], policy: Remat, runtime: Runtime) -> None:
    """Run the decoder layers of ``model`` as a loop. Calling it again changes nothing.

    Args:
        axes: The mesh axes that the dimensions of each of the model's parameters go over, by its name.
        policy: What the loop's backward computes again: "full" or "dots".

    Raises:
        ScanImpossible: See `find_layers`.
    """
    name, layers = find_layers(model)
    owner_name, _, attribute = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if "forward" in vars(owner) and getattr(owner.forward, "scans", False):
        return
    first = f"{name}.0."
    of_layer = {key.removeprefix(first): value for key, value in axes.items() if key.startswith(first)}
    scanned = _Scanned(layers, of_layer, policy, runtime)
    forward = owner.forward

    def scanning_forward(*args: Any, **kwargs: Any) -> Any:
        with _in_place_of(owner, attribute, scanned):
            return forward(*args, **kwargs)

    scanning_forward.scans = True  # type: ignore[attr-defined]
    owner.forward = scanning_forward


class _Scanned(nn.Module):
    """All layers, called as if they were one."""

    def __init__(self, layers: nn.ModuleList, axes: Mapping[str, Axes], policy: Remat, runtime: Runtime) -> None:
        super().__init__()
        self._layers, self._axes, self._policy, self._runtime = tuple(layers), axes, policy, runtime

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._runtime.scan(self._layers, self._axes, self._policy, hidden, *args, **kwargs)


@contextmanager
def _in_place_of(owner: nn.Module, attribute: str, scanned: nn.Module) -> Iterator[None]:
    layers = owner._modules[attribute]
    owner._modules[attribute] = nn.ModuleList([scanned])
    try:
        yield
    finally:
        owner._modules[attribute] = layers
