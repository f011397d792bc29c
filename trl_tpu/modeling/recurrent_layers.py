"""How recurrent layers are recognized and split: every assumption about transformers' code, with its reason.

Linear attention (Gated DeltaNet, KDA), state-space layers and short convolutions carry a state from token to token.
transformers gives them no common class, and no function that reads a part of a row. They share the protocol of its
cache: to generate text, a layer reads its state from the cache and writes the next state back. So the layers' own
forwards read packed rows, and no model code is copied. This relies on:

1. A layer is recurrent if its ``forward`` names a method of the cache that updates states (`carries_states`): the
   classes differ by family, and attention layers update keys and values instead.
2. The cache is the parameter with one of three names (`_CACHE_PARAMETERS`).
3. A tensor whose first dimensions are rows and columns has a value per token, and all other arguments are for all
   tokens (`is_per_token`). Masks of padding are left out, since packed rows have no padding.
4. Only functions of the family's module with a parameter for an initial state carry a recurrent state over a sequence.
   Rows of planned shapes replace these rules in a copy of the layer's forward (`replace_rules`): the module itself
   belongs to all models of the process.
5. A call with a state and one token is a step of generation (`tree_states._read_node`).

`tests/unit/test_recurrent_layers.py` lists the layers that this finds and misses in transformers' source. The list is
not used here: unlisted families qualify alike, by the trial `packability.check_packing_is_exact`. It rejects a model
if one of its layers was missed, or takes no initial state.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from ..packing.shapes import CHUNK

STATE_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
INITIAL_STATES = frozenset({"initial_state", "initial_states"})
# `cache` since transformers 5.24
_CACHE_PARAMETERS = ("cache", "cache_params", "past_key_values")
_MASK_PARAMETERS = ("attention_mask", "conv_mask")


def carries_states(module: nn.Module) -> bool:
    """Return whether the code of a layer's forward updates states in transformers' caches."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not STATE_UPDATES.isdisjoint(code.co_names)


def shared_chunk(model: nn.Module) -> int:
    """Return the granularity of shared prefixes in planned rows, in tokens: `CHUNK` with recurrent layers, else 1."""
    return CHUNK if any(map(carries_states, model.modules())) else 1


def is_per_token(value: Any, rows: int, columns: int) -> bool:
    """Return whether an argument has a value for each token of ``rows`` by ``columns``."""
    return isinstance(value, torch.Tensor) and value.shape[:2] == (rows, columns)


class LayerCall(NamedTuple):
    """A call of a recurrent layer, with its arguments by their meaning.

    Attributes:
        cache: Name of the cache parameter.
        tokens: Arguments with a value per token, [R, L, ...].
    """

    forward: Callable[..., Any]
    cache: str
    tokens: dict[str, torch.Tensor]
    others: dict[str, Any]

    @classmethod
    def of(cls, forward: Callable[..., Any], signature: inspect.Signature, args: Any, kwargs: Any, shape: Any) -> Self:
        """Sort the arguments of a layer's ``forward`` that reads rows of a shape."""
        cache, arguments = _cache_parameter(signature), arguments_of(signature, args, kwargs)
        kept = {name: value for name, value in arguments.items() if name not in (cache, *_MASK_PARAMETERS)}
        tokens = {name: value for name, value in kept.items() if is_per_token(value, *shape)}
        return cls(forward, cache, tokens, {name: value for name, value in kept.items() if name not in tokens})

    def read(self, tokens: Mapping[str, torch.Tensor], states: "States") -> Any:
        """Read other tokens with ``states``; the layer replaces them by the states after these tokens."""
        return self.forward(**tokens, **self.others, **{self.cache: states})


def call_with_states(layer: nn.Module, hidden_1LH: torch.Tensor, states: "States") -> Any:
    """Call a recurrent layer with ``states``; the layer replaces them by the states after these tokens."""
    return layer(hidden_1LH, **{_cache_parameter(inspect.signature(layer.forward)): states})


def arguments_of(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    arguments = signature.bind(*args, **kwargs).arguments
    further = arguments.pop("kwargs", {})
    return arguments | further


def _cache_parameter(signature: inspect.Signature) -> str:
    return next(name for name in _CACHE_PARAMETERS if name in signature.parameters)


class States:
    """A recurrent layer's cache for one node: holds the parent's states until the layer writes the node's states.

    It has the methods of transformers' `Cache` that recurrent layers call.
    """

    def __init__(self, before: "States | None" = None) -> None:
        self._states: dict[tuple[str, int], torch.Tensor] = dict(before._states) if before else {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # a layer that recorded no past would write into a state in place

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Store the last inputs of a convolution, and return the inputs with the parent's last inputs before them."""
        before, inputs = self._states.get(("conv", state_idx)), conv_states
        if conv_kernel_size is not None:  # else `conv_states` is the state itself, not the inputs
            inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
            last = inputs[..., -conv_kernel_size:]
            conv_states = nn.functional.pad(last, (conv_kernel_size - last.shape[-1], 0))
        self._states["conv", state_idx] = conv_states
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._states["recurrent", state_idx] = recurrent_states
        return recurrent_states


def replace_rules(forward: Callable[..., Any], scan: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward that calls ``scan(rule, state parameter, ...)`` in place of each of its rules.

    It is a copy with other globals: the family's module, which all other models share, is unchanged.
    """
    return MethodType(_with_scanned_rules(inspect.unwrap(forward.__func__), scan), forward.__self__)  # type: ignore[attr-defined]


@lru_cache
def _with_scanned_rules(function: FunctionType, scan: Callable[..., Any]) -> FunctionType:
    scans = {
        name: partial(scan, rule, state)
        for name in function.__code__.co_names
        if inspect.isfunction(rule := function.__globals__.get(name))
        for state in INITIAL_STATES & inspect.signature(rule).parameters.keys()
    }
    copy = FunctionType(
        function.__code__, function.__globals__ | scans, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
