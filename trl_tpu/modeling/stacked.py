"""A decoder's layers held as one while a model trains as a loop, so that nothing in a step grows with depth.

Of each kind of weight there is one parameter, [layers, ...], and so one gradient and one of each of the optimizer's
moments. They are in the place of the first layer's own, and the other layers' modules are empty; before and after, the
model and the optimizer have the very parameters that they were given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..runtime import PartitionSpec, Remat, Runtime
from .layers import ScanImpossible, find_layers

#: Optimizers whose update of a number depends on that number's own gradients, so that what is stacked is updated as if
#: it were not.
_ELEMENTWISE = (torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD)


class StackedLayers(nn.ModuleList):
    """All layers by their usual names, which to a model that runs through them are one.

    Parameters have the first layer's names, also in a ``state_dict``: `by_layer` gives every layer its own.
    """

    def __init__(self, layers: Iterable[nn.Module], loop: Callable[..., torch.Tensor]) -> None:
        super().__init__(layers)
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return iter([self._loop])

    def __getitem__(self, index: int | slice) -> Any:
        return [self._loop][index] if isinstance(index, slice) else super().__getitem__(index)


def by_layer(model: nn.Module, state: Mapping[str, Any], row: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Return ``state`` with what is named after stacked weights named after those of the layers one by one.

    Args:
        model: The model that the names are of. They may have more before and behind the weight's name.
        state: Anything by name. A tensor without dimensions counts for every layer.
        row: Takes any other entry, and a layer's number, and returns that layer's.
    """
    stacked = next((pair for pair in model.named_modules() if isinstance(pair[1], StackedLayers)), None)
    if stacked is None:
        return dict(state)
    path, layers = stacked
    named = {}
    for name, entry in state.items():
        before, is_stacked, after = name.partition(f"{path}.0.")
        if not is_stacked:
            named[name] = entry
            continue
        is_scalar = isinstance(entry, torch.Tensor) and entry.dim() == 0
        for number in range(len(layers)):
            # a clone, since files do not take tensors that share memory
            named[f"{before}{path}.{number}.{after}"] = entry.clone() if is_scalar else row(entry, number)
    return named


@dataclass(frozen=True)
class _Kind:
    """One weight of every layer, one by one and as one. Of the two, one is empty."""

    parts: list[nn.Parameter]
    whole: nn.Parameter
    axes: PartitionSpec
    nothing: torch.Tensor  # what the empty one has


class LayerStack:
    """A model's layers, which can be held as one, with the optimizer's state, and given back one by one.

    Args:
        axes: The mesh axes that the dimensions of each of the model's parameters go over, by its name.
        policy: What the loop's backward computes again: "full" or "dots".

    Raises:
        ScanImpossible: See `find_layers`.
    """

    def __init__(self, model: nn.Module, axes: Mapping[str, PartitionSpec], policy: Remat, runtime: Runtime) -> None:
        path, self._layers = find_layers(model)
        owner, _, self._attribute = path.rpartition(".")
        self.model, self._owner, self._runtime = model, model.get_submodule(owner), runtime
        by_name = [dict(layer.named_parameters()) for layer in self._layers]
        first = by_name[0]
        of_layer = {name: axes.get(f"{path}.0.{name}", (None,) * part.dim()) for name, part in first.items()}
        self._kinds = []
        for name, part in first.items():
            # uploaded once: tensors made on the device would be results of a program, in number as many as weights
            nothing = runtime.to_device(torch.empty(0, dtype=part.dtype), part.device)
            whole = nn.Parameter(nothing, part.requires_grad)
            self._kinds.append(_Kind([parts[name] for parts in by_name], whole, of_layer[name], nothing))
        self._places = [  # where each parameter is
            (module, leaf, parameter)
            for module in self._layers.modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._stacked = StackedLayers(self._layers, partial(runtime.scan, self._layers[0], of_layer, policy))
        self._optimizer: Optimizer | None = None  # whose state is stacked too
        self._groups: list[list[nn.Parameter]] = []  # its parameters, one by one

    @property
    def axes(self) -> dict[nn.Parameter, PartitionSpec]:
        """The mesh axes that the dimensions of the stacked parameters go over: the first goes over none."""
        return {kind.whole: (None, *kind.axes) for kind in self._kinds}

    @property
    def is_stacked(self) -> bool:
        return self._owner._modules[self._attribute] is not self._layers

    def stack(self, optimizer: Optimizer) -> None:
        """Hold the layers of the model as one, and the state of the optimizer, of which steps may be none yet.

        One kind of weight after the other, so that the devices hold one kind twice and no more.

        Raises:
            ScanImpossible: The optimizer's update of a layer would not be the same.
        """
        if self.is_stacked:
            return
        groups = self._stacked_groups(optimizer)
        self._optimizer, self._groups = optimizer, [group["params"] for group in optimizer.param_groups]
        for kind in self._kinds:
            kind.whole.data = self._join(list(kind.parts), kind.axes)
            states = [optimizer.state.pop(part, {}) for part in kind.parts]
            if states[0]:
                optimizer.state[kind.whole] = {
                    name: self._join([state[name] for state in states], kind.axes) if _has_rows(value) else value
                    for name, value in states[0].items()  # layers that are alike have taken the same steps
                }
            for part in kind.parts:
                part.data, part.grad = kind.nothing, None
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        wholes = {kind.parts[0]: kind.whole for kind in self._kinds}
        for module, leaf, parameter in self._places:
            module._parameters[leaf] = wholes.get(parameter)
        self._owner._modules[self._attribute] = self._stacked

    def unstack(self) -> None:
        """Give the layers, and the state of the optimizer, back one by one."""
        if not self.is_stacked:
            return
        optimizer = self._optimizer
        assert optimizer is not None
        self._runtime.step_boundary()  # the last step is a program of its own
        for kind in self._kinds:
            count = len(kind.parts)
            for part, weight in zip(kind.parts, self._cut(kind.whole, kind.axes), strict=True):
                part.data = weight
            kind.whole.data, kind.whole.grad = kind.nothing, None
            for name, value in optimizer.state.pop(kind.whole, {}).items():
                if _has_rows(value):
                    values = self._cut(value, kind.axes)
                else:
                    values = [value.clone() if isinstance(value, torch.Tensor) else value for _ in range(count)]
                for part, each in zip(kind.parts, values, strict=True):
                    optimizer.state[part][name] = each
        self._runtime.step_boundary()
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for module, leaf, parameter in self._places:
            module._parameters[leaf] = parameter
        self._owner._modules[self._attribute] = self._layers

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Give the layers back for as long as the context is open."""
        optimizer = self._optimizer if self.is_stacked else None
        self.unstack()
        yield
        if optimizer is not None:
            self.stack(optimizer)

    def _stacked_groups(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters of each of the optimizer's groups, those of the layers as one."""
        group_of = {
            parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        wholes: dict[nn.Parameter, nn.Parameter | None] = {}
        for kind in self._kinds:
            if len(groups := {group_of.get(part) for part in kind.parts}) > 1:
                raise ScanImpossible(
                    "scan_layers=True updates all layers alike, but the optimizer has a weight of some layers in "
                    f"another group, or not at all: {groups}. Give it all in one, or leave scan_layers out."
                )
            first, *others = kind.parts
            wholes |= {first: kind.whole} | dict.fromkeys(others)
        if any(part in group_of for part in wholes) and not isinstance(optimizer, _ELEMENTWISE):
            raise ScanImpossible(
                f"scan_layers=True holds the weights of all layers as one, and {type(optimizer).__name__} may look at "
                "a weight as a whole: choose optim='adamw_torch', or leave scan_layers out."
            )
        replaced = ([wholes.get(each, each) for each in group["params"]] for group in optimizer.param_groups)
        return [[each for each in parameters if each is not None] for parameters in replaced]

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
    """Tell whether a part of an optimizer's state is as large as its parameter: any other is alike in all layers."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
