"""Which models' layers can be one loop, so that compile time and program size do not grow with depth."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError


class ScanImpossible(UserError):
    """A model's layers cannot be a loop; the message says why."""


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder's layers, which are alike.

    Raises:
        ScanImpossible: If there is no one list of layers, they differ in more than the values of their parameters,
            share parameters, or compute with random numbers or buffers.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 1
        and all(isinstance(each, GradientCheckpointingLayer) for each in module)
    }
    if len(lists) != 1:
        raise ScanImpossible(
            f"scan_layers=True needs a model with one list of decoder layers, but {type(model).__name__} has "
            f"{', '.join(lists) or 'none'}: leave it out."
        )
    ((name, layers),) = lists.items()
    if obstacle := _obstacle(model, name, layers):
        raise ScanImpossible(f"scan_layers=True runs one layer with the weights of all, but {obstacle}: leave it out.")
    return name, layers


def _obstacle(model: nn.Module, name: str, layers: nn.ModuleList) -> str | None:
    """Tell what keeps the layers from being a loop; None if nothing does."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for key, parameter in layers.named_parameters():
        if uses[parameter] > 1:
            return f"{name}.{key} is used elsewhere too"
    first = dict(_features(layers[0]))
    for number, layer in enumerate(layers):
        other = dict(_features(layer))
        for key in [*first, *other]:
            if first.get(key) != other.get(key):
                return f"{name}.0 and {name}.{number} differ: {key} is {first.get(key)} and {other.get(key)}"
    for key, value in first.items():
        if key.endswith(("dropout", "dropout.p", ".p")) and isinstance(value, float) and value > 0:
            return f"the backward computes it again, without the same random numbers, and {name}.0 has {key}={value}"
    for key, _ in layers[0].named_buffers():
        return f"{name}.0 also has a buffer, {key}"
    return None


def _features(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield all that tells what a layer computes, but for the values of its parameters."""
    for prefix, module in layer.named_modules():
        yield prefix, type(module).__qualname__
        for key, value in vars(module).items():
            if key != "layer_idx" and isinstance(value, bool | int | float | str | None):
                yield f"{prefix}.{key}".lstrip("."), value
    for key, parameter in layer.named_parameters():
        yield key, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
