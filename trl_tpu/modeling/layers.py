"""Stack a model's layers, and their optimizer state, into one compiled loop."""

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
from ..runtime import PartitionSpec, Remat, Runtime


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder's layers, if they can run as a loop.

    Raises:
        UserError: If the model does not have exactly one list of layers, or the layers differ in more than the
            values of their parameters, share parameters, or compute with random numbers or buffers.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 1
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    }
    if (obstacle := _scan_obstacle(model, lists)) is not None:
        raise UserError(f"scan_layers=True runs one layer with the weights of all, but {obstacle}. Leave it out.")
    return next(iter(lists.items()))


def _scan_obstacle(model: nn.Module, lists: Mapping[str, nn.ModuleList]) -> str | None:
    """Return why the lists of decoder layers are not one list that can run as a loop, or None."""
    if len(lists) != 1:
        return f"{type(model).__name__} has {len(lists)} lists of decoder layers"
    ((name, layers),) = lists.items()
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for key, parameter in layers.named_parameters():
        if uses[parameter] > 1:
            return f"{name}.{key} is shared with another module"
    first = dict(_features(layers[0]))
    for number, layer in enumerate(layers):
        layer_features = dict(_features(layer))
        for key in [*first, *layer_features]:
            if first.get(key) != layer_features.get(key):
                return f"{name}.0 and {name}.{number} differ: {key} is {first.get(key)} and {layer_features.get(key)}"
    for key, value in first.items():
        if key.endswith(("dropout", "dropout.p", ".p")) and isinstance(value, float) and value > 0:
            return f"the backward recomputes layers with other random numbers, and {name}.0 has {key}={value}"
    for key, _ in layers[0].named_buffers():
        return f"{name}.0 has a buffer, {key}"
    return None


def _features(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield names and values of all settings that affect a layer's computation: all but the weights' values."""
    for prefix, module in layer.named_modules():
        yield prefix, type(module).__qualname__
        for key, value in vars(module).items():
            if key != "layer_idx" and isinstance(value, bool | int | float | str | None):
                yield f"{prefix}.{key}".lstrip("."), value
    for key, parameter in layer.named_parameters():
        yield key, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)


#: Optimizers that update each number by its own gradients only: stacking layers does not change their updates.
_ELEMENTWISE = (torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD)


class StackedLayers(nn.ModuleList):
    """Holds all layers under their usual names. Iterating yields one callable, the loop over all layers.

    Stacked parameters have the first layer's names, also in a ``state_dict``. `by_layer` expands them to all layers.
    """

    def __init__(self, layers: Iterable[nn.Module], loop: Callable[..., torch.Tensor]) -> None:
        super().__init__(layers)
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return iter([self._loop])

    def __getitem__(self, index: int | slice) -> Any:
        return [self._loop][index] if isinstance(index, slice) else super().__getitem__(index)


def by_layer(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with one entry per layer in place of each entry of a stacked weight.

    Args:
        model: A model whose layers may be stacked.
        state: Tensors, shards or numbers by name. A name contains a parameter's name, with any prefix and suffix.
            Every layer gets a copy of a number or of a tensor without dimensions, and its own row of other tensors.
    """
    stacked = next((pair for pair in model.named_modules() if isinstance(pair[1], StackedLayers)), None)
    if stacked is None:
        return dict(state)
    path, layers = stacked
    by_name: dict[str, Any] = {}
    for name, entry in state.items():
        before, is_stacked, after = name.partition(f"{path}.0.")
        if is_stacked:
            by_name |= {f"{before}{path}.{number}.{after}": _row(entry, number) for number in range(len(layers))}
        else:
            by_name[name] = entry
    return by_name


@dataclass(frozen=True)
class _Weight:
    """One weight of every layer, in separate and in stacked form. One of the two forms is empty."""

    name: str  # within a layer
    parts: list[nn.Parameter]  # one parameter per layer
    whole: nn.Parameter  # all layers stacked
    axes: PartitionSpec  # mesh axes of one layer's weight
    empty: torch.Tensor  # data of the empty form


class LayerStack:
    """Stacks a model's layers and their optimizer state into one layer, and unstacks them.

    Args:
        model: The model.
        axes: The mesh axes of each parameter's dimensions, by the parameter's name.
        policy: Recomputation in the loop's backward: "full" or "dots".
        runtime: The devices' runtime.

    Raises:
        UserError: The layers cannot run as a loop: see `find_layers`.
    """

    def __init__(self, model: nn.Module, axes: Mapping[str, PartitionSpec], policy: Remat, runtime: Runtime) -> None:
        path, self._layers = find_layers(model)
        owner, _, self._attribute = path.rpartition(".")
        self.model, self._owner, self._runtime = model, model.get_submodule(owner), runtime
        self._weights: list[_Weight] = []
        for name, first in self._layers[0].named_parameters():
            # Uploaded from the host: an empty tensor per weight, made on the device, would be a program's output.
            empty = runtime.to_device(torch.empty(0, dtype=first.dtype), first.device)
            parts = [layer.get_parameter(name) for layer in self._layers]
            whole = nn.Parameter(empty, first.requires_grad)
            layer_axes = axes.get(f"{path}.0.{name}", (None,) * first.dim())
            self._weights.append(_Weight(name, parts, whole, layer_axes, empty))
        axes_by_name = {weight.name: weight.axes for weight in self._weights}
        self._stacked = StackedLayers(self._layers, partial(runtime.scan, self._layers[0], axes_by_name, policy))
        self._optimizer: Optimizer | None = None  # optimizer with stacked state; None while layers are separate
        self._groups: list[list[nn.Parameter]] = []  # parameters of the optimizer's groups before stacking

    @property
    def axes(self) -> dict[nn.Parameter, PartitionSpec]:
        """The mesh axes of the stacked parameters' dimensions. The first dimension, the layer, is not sharded."""
        return {weight.whole: (None, *weight.axes) for weight in self._weights}

    def stack(self, optimizer: Optimizer) -> None:
        """Stack the model's layers and the optimizer's state, if the optimizer has any yet.

        Weights are stacked one at a time: the devices hold at most one weight twice.

        Raises:
            UserError: The optimizer would update stacked layers differently.
        """
        if self._optimizer is not None:
            return
        stacked = self._stacked_by_parameter(optimizer)
        self._optimizer, self._groups = optimizer, [group["params"] for group in optimizer.param_groups]
        for weight in self._weights:
            weight.whole.data = self._stack_parts(list(weight.parts), weight.axes)
            states = [optimizer.state.pop(part, {}) for part in weight.parts]
            for name, value in states[0].items():  # all layers have taken the same number of steps
                if _has_rows(value):
                    value = self._stack_parts([state[name] for state in states], weight.axes)
                optimizer.state[weight.whole][name] = value
            for part in weight.parts:
                part.data, part.grad = weight.empty, None
            self._assign(weight, [weight.whole, *[None] * (len(self._layers) - 1)])
        for group in optimizer.param_groups:
            group["params"] = [whole for each in group["params"] for whole in stacked.get(each, [each])]
        self._owner._modules[self._attribute] = self._stacked

    def unstack(self) -> None:
        """Unstack the layers and the optimizer's state."""
        optimizer, self._optimizer = self._optimizer, None
        if optimizer is None:
            return
        self._runtime.step_boundary()  # run the last training step as a separate program
        for weight in self._weights:
            for part, data in zip(weight.parts, self._split(weight.whole, weight.axes), strict=True):
                part.data = data
            weight.whole.data, weight.whole.grad = weight.empty, None
            for name, value in optimizer.state.pop(weight.whole, {}).items():
                rows = self._split(value, weight.axes) if _has_rows(value) else None
                for number, part in enumerate(weight.parts):
                    optimizer.state[part][name] = _row(value, number) if rows is None else rows[number]
            self._assign(weight, weight.parts)
        self._runtime.step_boundary()
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._owner._modules[self._attribute] = self._layers

    @contextmanager
    def unstacked(self) -> Iterator[None]:
        """Unstack the layers while the context is open."""
        optimizer = self._optimizer
        self.unstack()
        yield
        if optimizer is not None:
            self.stack(optimizer)

    def _stacked_by_parameter(self, optimizer: Optimizer) -> dict[nn.Parameter, list[nn.Parameter]]:
        """Return what replaces each layer's weights in the optimizer's groups: the stacked weight, once per weight."""
        group_of = {
            parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        stacked: dict[nn.Parameter, list[nn.Parameter]] = {}
        for weight in self._weights:
            groups = {group_of.get(part) for part in weight.parts}
            if len(groups) > 1 or (groups != {None} and not isinstance(optimizer, _ELEMENTWISE)):
                raise UserError(
                    "scan_layers=True stacks the weights of all layers into one tensor, but "
                    f"{type(optimizer).__name__} may compute over whole tensors, or has the same weight of different "
                    f"layers in different groups or not at all ({groups}). Choose optim='adamw_torch', put the "
                    "weights of all layers into one group, or leave scan_layers out."
                )
            first, *later = weight.parts
            stacked |= {first: [weight.whole]} | dict.fromkeys(later, [])
        return stacked

    def _assign(self, weight: _Weight, parameters: Iterable[nn.Parameter | None]) -> None:
        """Assign a parameter, or None, to each layer."""
        path, _, leaf = weight.name.rpartition(".")
        for layer, parameter in zip(self._layers, parameters, strict=True):
            layer.get_submodule(path)._parameters[leaf] = parameter

    def _stack_parts(self, parts: list[torch.Tensor], axes: PartitionSpec) -> torch.Tensor:
        whole = torch.stack([part.detach() for part in parts])
        whole = self._runtime.place(whole, (None, *axes), whole.device)
        self._runtime.step_boundary()
        return whole

    def _split(self, whole: torch.Tensor, axes: PartitionSpec) -> list[torch.Tensor]:
        parts = [part.clone() for part in whole.detach().unbind()]
        parts = [self._runtime.place(part, axes, part.device) for part in parts]
        self._runtime.step_boundary()
        return parts


def _has_rows(value: Any) -> bool:
    """Return whether a tensor, or its shards, has one row per layer; any other value belongs to all layers."""
    return len(getattr(value, "shape", getattr(value, "global_shape", ()))) > 0


def _row(value: Any, number: int) -> Any:
    """Return a layer's part of a value. A shared tensor is cloned: files cannot hold tensors that share memory."""
    if _has_rows(value):
        return value[number]
    return value.clone() if isinstance(value, torch.Tensor) else value
