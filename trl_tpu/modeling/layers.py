"""How the layers of a model run: stacked into one loop, experts, dropout, frozen ones."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from ..parallel.shard import kind_of
from ..runtime import PartitionSpec, Remat, Runtime


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set the probability of every `nn.Dropout` to 0, in place."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0


def freeze(model: nn.Module, pattern: str | None) -> None:
    """Freeze the parameters whose names contain a match of ``pattern``; None freezes none.

    Raises:
        UserError: It matches no trainable parameter, or all of them.
    """
    if pattern is None:
        return
    names: dict[nn.Parameter, list[str]] = {}  # a tied one has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    frozen = [parameter for parameter, own in names.items() if any(re.search(pattern, name) for name in own)]
    if len(frozen) in (0, len(names)):
        kinds = dict.fromkeys(kind_of(name) for own in names.values() for name in own)
        raise UserError(
            f"frozen_parameters={pattern!r} is found in the names of {'all' if frozen else 'no'} parameters that "
            f"would train: {', '.join(kinds)}. Give a regular expression that is found in some of them."
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


class ScanImpossible(UserError):
    """A model's layers cannot be a loop; the message says why."""


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder's layers, if they can run as a loop.

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
    """Return why the layers cannot run as a loop, or None."""
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
    """Yield the name and value of everything that decides a layer's computation, except its weights."""
    for prefix, module in layer.named_modules():
        yield prefix, type(module).__qualname__
        for key, value in vars(module).items():
            if key != "layer_idx" and isinstance(value, bool | int | float | str | None):
                yield f"{prefix}.{key}".lstrip("."), value
    for key, parameter in layer.named_parameters():
        yield key, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)


#: Optimizers whose update of a number depends on that number's own gradients, so that what is stacked is updated as if
#: it were not.
_ELEMENTWISE = (torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD)


class StackedLayers(nn.ModuleList):
    """All layers under their usual names. A model that iterates over them gets one: the loop.

    Parameters have the first layer's names, also in a ``state_dict``; `by_layer` replaces them by each layer's.
    """

    def __init__(self, layers: Iterable[nn.Module], loop: Callable[..., torch.Tensor]) -> None:
        super().__init__(layers)
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return iter([self._loop])

    def __getitem__(self, index: int | slice) -> Any:
        return [self._loop][index] if isinstance(index, slice) else super().__getitem__(index)


def by_layer(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with an entry for each layer in place of each entry of a stacked weight.

    Args:
        model: The model.
        state: Tensors, shards or numbers by name: a parameter's, with anything before and behind it. A number, or a
            tensor without dimensions, counts for every layer; of others each layer gets its row.
    """
    stacked = next((pair for pair in model.named_modules() if isinstance(pair[1], StackedLayers)), None)
    if stacked is None:
        return dict(state)
    path, layers = stacked
    named: dict[str, Any] = {}
    for name, entry in state.items():
        before, is_stacked, after = name.partition(f"{path}.0.")
        if is_stacked:
            named |= {f"{before}{path}.{number}.{after}": _row(entry, number) for number in range(len(layers))}
        else:
            named[name] = entry
    return named


@dataclass(frozen=True)
class _Weight:
    """One weight of every layer, separate and stacked. One of the two is empty."""

    name: str  # in a layer
    parts: list[nn.Parameter]
    whole: nn.Parameter
    axes: PartitionSpec  # of one layer's weight
    nothing: torch.Tensor  # the empty one's data


class LayerStack:
    """Stacks a model's layers and their optimizer state into one layer, and unstacks them.

    Args:
        axes: The mesh axes of the dimensions of each of the model's parameters, by its name.
        policy: What the loop's backward computes again: "full" or "dots".

    Raises:
        ScanImpossible: See `find_layers`.
    """

    def __init__(self, model: nn.Module, axes: Mapping[str, PartitionSpec], policy: Remat, runtime: Runtime) -> None:
        path, self._layers = find_layers(model)
        owner, _, self._attribute = path.rpartition(".")
        self.model, self._owner, self._runtime = model, model.get_submodule(owner), runtime
        self._weights: list[_Weight] = []
        for name, first in self._layers[0].named_parameters():
            # uploaded once: tensors made on the device would be results of a program, in number as many as weights
            nothing = runtime.to_device(torch.empty(0, dtype=first.dtype), first.device)
            parts = [layer.get_parameter(name) for layer in self._layers]
            whole = nn.Parameter(nothing, first.requires_grad)
            layer_axes = axes.get(f"{path}.0.{name}", (None,) * first.dim())
            self._weights.append(_Weight(name, parts, whole, layer_axes, nothing))
        of_layer = {weight.name: weight.axes for weight in self._weights}
        self._stacked = StackedLayers(self._layers, partial(runtime.scan, self._layers[0], of_layer, policy))
        self._optimizer: Optimizer | None = None  # whose state is stacked too; None while layers are separate
        self._groups: list[list[nn.Parameter]] = []  # its parameters, one by one

    @property
    def axes(self) -> dict[nn.Parameter, PartitionSpec]:
        """The mesh axes of the dimensions of the stacked parameters: the first goes over none."""
        return {weight.whole: (None, *weight.axes) for weight in self._weights}

    def stack(self, optimizer: Optimizer) -> None:
        """Stack the model's layers and the state of the optimizer, which may have taken no step yet.

        One weight at a time, so that the devices hold at most one twice.

        Raises:
            ScanImpossible: The optimizer's update of a layer would not be the same.
        """
        if self._optimizer is not None:
            return
        groups = self._stacked_groups(optimizer)
        self._optimizer, self._groups = optimizer, [group["params"] for group in optimizer.param_groups]
        for weight in self._weights:
            weight.whole.data = self._join(list(weight.parts), weight.axes)
            states = [optimizer.state.pop(part, {}) for part in weight.parts]
            if states[0]:
                optimizer.state[weight.whole] = {
                    name: self._join([state[name] for state in states], weight.axes) if _has_rows(value) else value
                    for name, value in states[0].items()  # layers that are alike have taken the same steps
                }
            for part in weight.parts:
                part.data, part.grad = weight.nothing, None
            self._assign(weight, [weight.whole, *[None] * (len(self._layers) - 1)])
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        self._owner._modules[self._attribute] = self._stacked

    def unstack(self) -> None:
        """Unstack the layers and the state of the optimizer."""
        optimizer, self._optimizer = self._optimizer, None
        if optimizer is None:
            return
        self._runtime.step_boundary()  # the last step is a program of its own
        for weight in self._weights:
            for part, data in zip(weight.parts, self._cut(weight.whole, weight.axes), strict=True):
                part.data = data
            weight.whole.data, weight.whole.grad = weight.nothing, None
            for name, value in optimizer.state.pop(weight.whole, {}).items():
                rows = self._cut(value, weight.axes) if _has_rows(value) else None
                for number, part in enumerate(weight.parts):
                    optimizer.state[part][name] = _row(value, number) if rows is None else rows[number]
            self._assign(weight, weight.parts)
        self._runtime.step_boundary()
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._owner._modules[self._attribute] = self._layers

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Unstack the layers while the context is open."""
        optimizer = self._optimizer
        self.unstack()
        yield
        if optimizer is not None:
            self.stack(optimizer)

    def _stacked_groups(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters of the optimizer's groups, with stacked weights for those of the layers."""
        group_of = {
            parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
        for weight in self._weights:
            groups = {group_of.get(part) for part in weight.parts}
            if len(groups) > 1:
                raise ScanImpossible(
                    "scan_layers=True updates all layers alike, but the optimizer has a weight of some layers in "
                    f"another group, or not at all: {groups}. Give it all in one, or leave scan_layers out."
                )
            if groups != {None} and not isinstance(optimizer, _ELEMENTWISE):
                raise ScanImpossible(
                    f"scan_layers=True holds the weights of all layers as one, and {type(optimizer).__name__} may "
                    "look at a weight as a whole: choose optim='adamw_torch', or leave scan_layers out."
                )
            first, *others = weight.parts
            replaced |= {first: [weight.whole]} | dict.fromkeys(others, [])
        return [
            [stacked for parameter in group["params"] for stacked in replaced.get(parameter, [parameter])]
            for group in optimizer.param_groups
        ]

    def _assign(self, weight: _Weight, parameters: Iterable[nn.Parameter | None]) -> None:
        """Put a parameter, or none, into each layer."""
        path, _, leaf = weight.name.rpartition(".")
        for layer, parameter in zip(self._layers, parameters, strict=True):
            layer.get_submodule(path)._parameters[leaf] = parameter

    def _join(self, parts: list[torch.Tensor], axes: PartitionSpec) -> torch.Tensor:
        whole = torch.stack([part.detach() for part in parts])
        whole = self._runtime.place(whole, (None, *axes), whole.device)
        self._runtime.step_boundary()
        return whole

    def _cut(self, whole: torch.Tensor, axes: PartitionSpec) -> list[torch.Tensor]:
        parts = [part.clone() for part in whole.detach().unbind()]
        parts = [self._runtime.place(part, axes, part.device) for part in parts]
        self._runtime.step_boundary()
        return parts


def _has_rows(value: Any) -> bool:
    """Tell whether a tensor, or its shards, has a row for each layer; any other value counts for all layers."""
    return len(getattr(value, "shape", getattr(value, "global_shape", ()))) > 0


def _row(value: Any, number: int) -> Any:
    """Return a layer's part of a value; a clone of what all layers have, since files take no tensors in one memory."""
    if _has_rows(value):
        return value[number]
    return value.clone() if isinstance(value, torch.Tensor) else value
