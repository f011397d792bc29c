"""Recurrent layers over rows of planned shapes: chunk by chunk, each chunk from the state of its parent chunk.

A device that compiles once per shape cannot split rows at data-dependent branches. Instead every row is split into
chunks of `CHUNK` tokens, and sequences share whole chunks only (`Sequences.chunk`). A chunk then continues exactly one
other chunk of its row, or none. The layer's own forward is called once, with the chunks of all rows as its batch:

- A convolution takes its last inputs from the parent chunk, through the layer's cache.
- The rule that carries the recurrent state runs as a loop over the chunks of a row. All rows advance together.

Letters: R rows, M chunks per row, C tokens per chunk.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from ..packing.batch import Batch
from ..packing.shapes import CHUNK
from ..runtime import current
from .forward import PackingImpossible, current_packed_batch
from .recurrent_layers import LayerCall, States, arguments_of, is_per_token, replace_rules


def parents_of_chunks(batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Return the number of each chunk's parent chunk in its row, [R, M]; -1 for none."""
    assert batch.subtree_end_RL is not None  # packed rows have it
    end_R1M = batch.subtree_end_RL[:, None, ::CHUNK]
    number_M = torch.arange(end_R1M.shape[-1], device=end_R1M.device)
    is_ancestor_RMM = (end_R1M > number_M[:, None] * CHUNK) & (number_M < number_M[:, None])
    return (is_ancestor_RMM * (number_M + 1)).amax(-1) - 1


def call_by_chunks(call: LayerCall, batch: Batch[torch.Tensor]) -> Any:
    """Call a recurrent layer's own forward with the chunks of all rows as its batch.

    Args:
        call: The layer's call for the whole rows.
        batch: Packed rows whose sequences share whole chunks.

    Raises:
        PackingImpossible: If the row length is not a multiple of `CHUNK`, or a convolution computes its state itself.
    """
    rows, length = batch.input_ids_RL.shape
    if length % CHUNK:
        raise PackingImpossible(f"recurrent layers read rows whose length is a multiple of {CHUNK} (got {length})")
    chunks = {name: value.reshape(-1, CHUNK, *value.shape[2:]) for name, value in call.tokens.items()}
    chunked = call._replace(forward=replace_rules(call.forward, _scan_rule))
    output = chunked.read(chunks, _ChunkStates(parents_of_chunks(batch)))
    return tree_map(lambda part: part.reshape(rows, length, *part.shape[2:]), output)


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


def _scan_rule(rule: Callable[..., Any], state: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``rule`` chunk by chunk. A rule takes an initial ``state``, and returns outputs and the last state."""
    batch = current_packed_batch()
    assert batch is not None
    parent_RM = parents_of_chunks(batch)
    rows, count = parent_RM.shape
    arguments = arguments_of(inspect.signature(rule), args, kwargs)
    arguments.pop(state, None)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in arguments.items() if name not in names}

    def by_chunk(value: torch.Tensor) -> torch.Tensor:
        if is_per_token(value, rows * count, CHUNK):
            return value.unflatten(0, (rows, count)).transpose(0, 1)
        return value.expand(count, *value.shape)  # a weight of the rule: the gradients of all chunks add up

    def on_chunk(initial: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rule(**dict(zip(names, tensors, strict=True)), **others, **{state: initial})

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
