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
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from .. import runtime
from ..errors import UserError
from ..parallel.mesh import BATCH_AXES
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


STATIC_EXPERTS = "trl_tpu_static"


def static_experts(
    experts: Any, hidden_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum, [T, H], of the experts that each token is routed to.

    Args:
        experts: transformers' module of E experts' weights.
        hidden_TH: The tokens' hidden states.
        expert_TK: The K experts of each token.
        weight_TK: Their weights.
    """
    inner = "gate_up_proj" if experts.has_gate else "up_proj"
    every_E = torch.arange(len(getattr(experts, inner)), device=hidden_TH.device)
    weight_TE = (weight_TK.unsqueeze(-1) * (expert_TK.unsqueeze(-1) == every_E)).sum(1)
    inner_ETI = _each(experts, hidden_TH.expand(len(every_E), -1, -1), inner)
    inner_ETI = experts._apply_gate(inner_ETI) if experts.has_gate else experts.act_fn(inner_ETI)
    outer_ETH = _each(experts, inner_ETI, "down_proj")
    if experts.has_post_expert_norm:
        outer_ETH = experts.post_expert_norm(outer_ETH)
    return torch.einsum("eth,te->th", outer_ETH, weight_TE.to(outer_ETH.dtype)).to(hidden_TH.dtype)


def _each(experts: Any, input_ETI: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(experts, name)
    weight_EIO = weight if experts.is_transposed else weight.transpose(1, 2)
    output_ETO = torch.bmm(input_ETI.to(weight.dtype), weight_EIO)
    # on a mesh: whole experts over `tensor`, tokens where they are
    output_ETO = runtime.current().constrain(output_ETO, ("tensor", BATCH_AXES, None))
    return output_ETO + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else output_ETO


def use_static_experts(model: PreTrainedModel) -> None:
    """Select `static_experts` for the mixture-of-experts blocks of ``model``, if it has any."""
    ALL_EXPERTS_FUNCTIONS.register(STATIC_EXPERTS, static_experts)
    model.set_experts_implementation(STATIC_EXPERTS)


#: Optimizers whose update of a number depends on that number's own gradients, so that what is stacked is updated as if
#: it were not.
_ELEMENTWISE = (torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD)


class StackedLayers(nn.ModuleList):
    """All layers under their usual names. A model that iterates over them gets one: the loop.

    Parameters have the first layer's names, also in a ``state_dict``; `by_layer` gives each layer its own.
    """

    def __init__(self, layers: Iterable[nn.Module], loop: Callable[..., torch.Tensor]) -> None:
        super().__init__(layers)
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return iter([self._loop])

    def __getitem__(self, index: int | slice) -> Any:
        return [self._loop][index] if isinstance(index, slice) else super().__getitem__(index)


def by_layer(model: nn.Module, state: Mapping[str, Any], row: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Return ``state`` with an entry for each layer in place of each entry of a stacked weight.

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
    """One weight of every layer, separate and stacked. One of the two is empty."""

    parts: list[nn.Parameter]
    whole: nn.Parameter
    axes: PartitionSpec
    nothing: torch.Tensor  # what the empty one has


class LayerStack:
    """Stacks a model's layers and their optimizer state into one layer, and unstacks them.

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
        """Stack the model's layers and the state of the optimizer, which may have taken no step yet.

        One kind of weight at a time, so that the devices hold at most one kind twice.

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
        """Unstack the layers and the state of the optimizer."""
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
        """Unstack the layers while the context is open."""
        optimizer = self._optimizer if self.is_stacked else None
        self.unstack()
        yield
        if optimizer is not None:
            self.stack(optimizer)

    def _stacked_groups(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters of the optimizer's groups, with stacked weights for those of the layers."""
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
    """Tell whether a part of an optimizer's state has its parameter's shape; others are equal in all layers."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
