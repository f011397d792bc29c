"""Recurrent layers over rows of planned shapes: chunk by chunk, each chunk from the state of its parent chunk.

A device that compiles once per shape cannot split rows at data-dependent branches. Instead every row is split into
chunks of `CHUNK` tokens, and sequences share whole chunks only (`Sequences.chunk`). A chunk then continues exactly one
other chunk of its row, or none. The layer's own forward is called once, with the chunks of all rows as its batch:

- A convolution takes its last inputs from the parent chunk, through the layer's cache.
- The rule that carries the recurrent state runs as a loop over the chunks of a row. All rows advance together.

Letters: R rows, M chunks per row, C tokens per chunk.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..packing.batch import Batch
from ..packing.shapes import CHUNK
from ..runtime import current
from .forward import PackingImpossible, current_packed_batch

# parameter of transformers' functions that carry a recurrent state over a sequence, by its two names
_INITIAL_STATES = ("initial_state", "initial_states")


def parents_of_chunks(batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Return the number of each chunk's parent chunk in its row, [R, M]; -1 for none."""
    assert batch.subtree_end_RL is not None  # packed rows have it
    end_R1M = batch.subtree_end_RL[:, None, ::CHUNK]
    number_M = torch.arange(end_R1M.shape[-1], device=end_R1M.device)
    is_ancestor_RMM = (end_R1M > number_M[:, None] * CHUNK) & (number_M < number_M[:, None])
    return (is_ancestor_RMM * (number_M + 1)).amax(-1) - 1


def call_by_chunks(
    forward: Callable[..., Any],
    batch: Batch[torch.Tensor],
    cache: str,
    tokens: Mapping[str, torch.Tensor],
    others: Any,
) -> Any:
    """Call a recurrent layer's own ``forward`` with the chunks of all rows as its batch.

    Args:
        forward: The layer's bound forward.
        batch: Packed rows whose sequences share whole chunks.
        cache: Name of the layer's cache parameter.
        tokens: Arguments with a value per token, [R, L, ...], by name.
        others: All other arguments, by name.

    Raises:
        PackingImpossible: If the row length is not a multiple of `CHUNK`, or a convolution computes its state itself.
    """
    rows, length = batch.input_ids_RL.shape
    if length % CHUNK:
        raise PackingImpossible(f"recurrent layers read rows whose length is a multiple of {CHUNK} (got {length})")
    chunks = {name: value.reshape(-1, CHUNK, *value.shape[2:]) for name, value in tokens.items()}
    output = _with_chunked_rules(forward)(**chunks, **others, **{cache: _ChunkStates(parents_of_chunks(batch))})
    if isinstance(output, tuple):
        return tuple(part.reshape(rows, length, *part.shape[2:]) for part in output)
    return output.reshape(rows, length, *output.shape[2:])


class States:
    """A recurrent layer's cache for one node: holds the parent's states until the layer writes the node's states.

    It has the methods of transformers' `Cache` that recurrent layers call.
    """

    def __init__(self, before: "States | None" = None) -> None:
        self._conv: dict[int, torch.Tensor] = dict(before._conv) if before else {}
        self._recurrent: dict[int, torch.Tensor] = dict(before._recurrent) if before else {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent.get(state_idx)

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
        if conv_kernel_size is None:  # `conv_states` is the state itself, not the inputs
            self._conv[state_idx] = conv_states
            return conv_states
        before = self._conv.get(state_idx)
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        last = inputs[..., -conv_kernel_size:]
        self._conv[state_idx] = nn.functional.pad(last, (conv_kernel_size - last.shape[-1], 0))
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._recurrent[state_idx] = recurrent_states
        return recurrent_states


class _ChunkStates(States):
    """States of all chunks: gives each chunk the last inputs of its parent's convolution.

    The loop over chunks passes the recurrent states.
    """

    def __init__(self, parent_RM: torch.Tensor) -> None:
        super().__init__()
        self._parent_RM = parent_RM

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the inputs, [R M, channels, C], with the last inputs of each chunk's parent before them."""
        if conv_kernel_size is None:
            raise PackingImpossible("the convolution computes its state itself; planned rows do not support that")
        rows, count = self._parent_RM.shape
        last_RM = conv_states[..., -conv_kernel_size:].unflatten(0, (rows, count))
        row_R1 = torch.arange(rows, device=conv_states.device)[:, None]
        before_RM = last_RM[row_R1, self._parent_RM.clamp(min=0)]
        before_RM = torch.where((self._parent_RM >= 0)[:, :, None, None], before_RM, 0)
        return torch.cat([before_RM.flatten(0, 1), conv_states], dim=-1)


def _with_chunked_rules(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward that calls `_scan_rule` instead of the functions that carry recurrent states.

    These functions are globals of the family's module. The returned forward is a copy with other globals, so the
    module and all other models are unchanged.
    """
    return MethodType(_copy_with_chunked_rules(inspect.unwrap(forward.__func__)), forward.__self__)  # type: ignore[attr-defined]


@lru_cache
def _copy_with_chunked_rules(function: FunctionType) -> FunctionType:
    rules = dict[str, Any]()
    for name in function.__code__.co_names:
        rule = function.__globals__.get(name)
        if inspect.isfunction(rule) and any(name in inspect.signature(rule).parameters for name in _INITIAL_STATES):
            rules[name] = wraps(rule)(partial(_scan_rule, rule))
    copy = FunctionType(
        function.__code__, function.__globals__ | rules, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _scan_rule(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``rule`` chunk by chunk. A rule takes an initial state, and returns outputs and the last state."""
    batch = current_packed_batch()
    assert batch is not None
    parent_RM = parents_of_chunks(batch)
    rows, count = parent_RM.shape
    arguments = inspect.signature(rule).bind(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    state_parameter = next(name for name in _INITIAL_STATES if name in inspect.signature(rule).parameters)
    arguments.pop(state_parameter, None)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in arguments.items() if name not in names}

    def by_chunk(value: torch.Tensor) -> torch.Tensor:
        if value.shape[:2] == (rows * count, CHUNK):
            return value.unflatten(0, (rows, count)).transpose(0, 1)
        return value.expand(count, *value.shape)  # a weight of the rule: the gradients of all chunks add up

    def on_chunk(initial: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rule(**dict(zip(names, tensors, strict=True)), **others, **{state_parameter: initial})

    outputs_MR: torch.Tensor = _ChunkScan.apply(on_chunk, parent_RM, *(by_chunk(arguments[name]) for name in names))
    return outputs_MR.transpose(0, 1).flatten(0, 1), outputs_MR.new_zeros(())


class _ChunkScan(torch.autograd.Function):
    """Loops over chunks. Saves the state after each chunk, and recomputes each chunk in the backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, on_chunk: Callable[..., Any], parent_RM: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        kind = tensors[0].device.type
        ctx.autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.on_chunk, (rows, count) = on_chunk, parent_RM.shape
        row_R, parent_MR = torch.arange(rows, device=parent_RM.device), parent_RM.T + 1
        number_M = torch.arange(1, count + 1, device=parent_RM.device)
        first = on_chunk(None, *(tensor[0] for tensor in tensors))[1]
        states = first.new_zeros(count + 1, *first.shape)  # index 0 holds zeros, for chunks without a parent

        def step(carry: list[Any], chunk: list[Any]) -> tuple[list[Any], list[Any]]:
            (states, row_R), (number, parent_R, *tensors) = carry, chunk
            with torch.no_grad():
                output, after = on_chunk(states[parent_R, row_R], *tensors)
            return [states.index_copy(0, number[None], after[None]), row_R], [output]

        (states, _), (outputs,) = current().loop(step, [states, row_R], [number_M, parent_MR, *tensors])
        ctx.save_for_backward(states, row_R, number_M, parent_MR, *tensors)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        states, row_R, number_M, parent_MR, *tensors = ctx.saved_tensors
        needs_gradient = ctx.needs_input_grad[2:]

        def step(carry: list[Any], chunk: list[Any]) -> tuple[list[Any], list[Any]]:
            (state_gradients, states, row_R), (number, parent_R, gradient, *tensors) = carry, chunk
            before = states[parent_R, row_R].detach().requires_grad_()
            tensors = [
                tensor.detach().requires_grad_(needed) for tensor, needed in zip(tensors, needs_gradient, strict=True)
            ]
            with torch.enable_grad(), ctx.autocast():
                output, after = ctx.on_chunk(before, *tensors)
            inputs = [before, *(tensor for tensor in tensors if tensor.requires_grad)]
            # not `state_gradients[number]`: the host would read the index from the device
            after_gradient = state_gradients.index_select(0, number[None])[0]
            gradients = torch.autograd.grad(
                (output, after), inputs, (gradient, after_gradient), materialize_grads=True
            )
            state_gradients = state_gradients.index_put((parent_R, row_R), gradients[0], accumulate=True)
            return [state_gradients, states, row_R], [*gradients[1:]]

        carry = [torch.zeros_like(states), states, row_R]
        _, results = current().loop(step, carry, [number_M, parent_MR, gradient, *tensors], reverse=True)
        gradients = iter(results)
        return (None, None, *(next(gradients) if needed else None for needed in needs_gradient))
