"""How recurrent layers are recognized and split: every assumption about transformers' code, with its reason.

Linear attention (Gated DeltaNet, KDA), state-space layers and short convolutions carry a state from token to token.
transformers gives them no common class, and no function that reads a part of a sequence. They share the protocol of
its cache: to generate text, a layer reads its state from the cache and writes the next state back. So the layers' own
forwards read packed rows, and no model code is copied. This relies on:

1. A layer is recurrent if its ``forward`` names a method of the cache that updates states (`carries_states`): the
   classes differ by family, and attention layers update keys and values instead.
2. The cache is the parameter with one of three names (`_CACHE_PARAMETERS`).
3. A tensor whose first dimensions are rows and columns has a value per token, and all other arguments are for all
   tokens (`is_per_token`). Masks of padding are left out, since packed rows have no padding.
4. Only functions of the family's module with a parameter for an initial state carry a recurrent state over a sequence.
   Packed rows replace these rules in a copy of the layer's forward (`_forward_of`): the module itself belongs to all
   models of the process. A rule is transformers' own code or an installed kernel with the same order of arguments.
5. Convolutions read at most `CONTEXT` earlier tokens.

`tests/unit/test_recurrent_layers.py` lists the layers that this finds and misses in transformers' source. The list is
not used here: unlisted families qualify alike, by the trial `packability.check_packing_is_exact`. It rejects a model
if one of its layers was missed, or takes no initial state.

The layer's forward is called once with all token rows, so products, norms and adapters read each token once. All other
modules of the model read the token rows as they are. In unpadded rows, convolutions read one long row, and a rule
reads the groups of a `ReadOrder`: paths up to branches, then what follows, from the states after the paths. Results
are exact in float64 for every family of transformers 5.23 whose rule takes an initial state.

A device that compiles once per shape cannot split token rows at data-dependent branches. Instead every planned row
is split into chunks of `CHUNK` tokens, and sequences share whole chunks only (`Sequences.chunk`). A chunk then
continues exactly one other chunk of its row, or none. The layer's forward is called with the chunks of all token rows
as its batch:

- A convolution takes its last inputs from the parent chunk, through the layer's cache.
- The rule that carries the recurrent state runs as a loop over the chunks of a token row. All rows advance together.

Letters: R token rows, M chunks per token row, C tokens per chunk; E and G as in `packing.read_order`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.utils.output_capturing import CompileableContextVar

from ..packing.batch import Batch, ReadOrder
from ..packing.shapes import CHUNK
from ..runtime import current
from .forward import PackingImpossible, current_packed_batch, reading
from .head_spec import is_wrapped, wrap_forward

STATE_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
INITIAL_STATES = frozenset({"initial_state", "initial_states"})
# `cache` since transformers 5.24
_CACHE_PARAMETERS = ("cache", "cache_params", "past_key_values")
_MASK_PARAMETERS = ("attention_mask", "conv_mask")
# set while installed kernels are not used: they run on GPUs only, and some take no float32
_WITHOUT_KERNELS = CompileableContextVar("without_kernels")


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


def cache_parameter(signature: inspect.Signature) -> str:
    """Return the name of the cache's parameter of a recurrent layer's forward."""
    return next(name for name in _CACHE_PARAMETERS if name in signature.parameters)


def arguments_of(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    arguments = signature.bind(*args, **kwargs).arguments
    further = arguments.pop("kwargs", {})
    return arguments | further


def has_rule(layer: nn.Module) -> bool:
    """Return whether a recurrent layer's forward calls a function that takes an initial state."""
    return any(states for *_, states in _functions_of(inspect.unwrap(type(layer).forward)).values())


def _functions_of(forward: FunctionType) -> dict[str, tuple[Any, FunctionType, frozenset[str]]]:
    """Return the functions of its module that a forward names: as called, as written, parameters for a state."""
    functions = dict[str, tuple[Any, FunctionType, frozenset[str]]]()
    for name in forward.__code__.co_names:
        called = written = forward.__globals__.get(name)
        if isinstance(called, nn.Module):  # the package `kernels` makes a module of a function that it may replace
            written = inspect.getclosurevars(type(called).forward).nonlocals.get("func")
        if inspect.isfunction(written):
            states = INITIAL_STATES & inspect.signature(written).parameters.keys()
            functions[name] = called, inspect.unwrap(written), states
    return functions


def _forward_of(layer: nn.Module, scans: bool) -> Callable[..., Any]:
    """Return a copy of a layer's forward with other globals: all models share the family's module.

    Args:
        layer: The layer.
        scans: Whether `_scan` calls the layer's rules.
    """
    forward, has_kernels = inspect.unwrap(type(layer).forward), _WITHOUT_KERNELS.get() is None
    return MethodType(_with_other_functions(forward, scans, has_kernels), layer)


@lru_cache
def _with_other_functions(forward: FunctionType, scans: bool, has_kernels: bool) -> FunctionType:
    names = dict(forward.__globals__)
    for name, (called, written, states) in _functions_of(forward).items():
        names[name] = called if has_kernels else written
        for state in states if scans else ():
            names[name] = partial(_scan, names[name], state)
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _scan(rule: Callable[..., Any], state: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``rule`` for packed rows. A rule takes an initial ``state``, and returns outputs and the last state."""
    batch = current_packed_batch()
    assert batch is not None
    if batch.read_order is None:
        outputs = _scan_chunks(parents_of_chunks(batch), rule, state, args, kwargs)
    else:
        outputs = _scan_groups(batch.read_order, rule, state, args, kwargs)
    return outputs, outputs.new_zeros(())


def use_tree_states(model: nn.Module) -> bool:
    """Let the recurrent layers of ``model`` read packed rows. Other batches are read as before.

    Returns:
        Whether the model has recurrent layers.
    """
    layers = [module for module in model.modules() if carries_states(module)]
    for layer in layers:
        wrap_forward(layer, _read_packed, layer, inspect.signature(layer.forward))
    return bool(layers)


def restore_layer_forwards(model: nn.Module) -> None:
    """Restore the forwards that `use_tree_states` wrapped."""
    for module in model.modules():
        if is_wrapped(module, _read_packed):
            module.forward = module.forward.__wrapped__  # type: ignore[union-attr, attr-defined]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let layers that `use_tree_states` prepared compute without installed kernels while the context is open."""
    outside = _WITHOUT_KERNELS.set(True)
    try:
        yield
    finally:
        _WITHOUT_KERNELS.reset(outside)


def recompute_in_same_batch(model: nn.Module) -> None:
    """Let recurrent layers that the backward recomputes read the batch of their forward, in any thread.

    Call it once the layers have their checkpointing functions.
    """
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and any(is_wrapped(part, _read_packed) for part in module.modules()):
            module._gradient_checkpointing_func = partial(_checkpoint_in_batch, checkpoint)  # type: ignore[assignment]


def _checkpoint_in_batch(checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(reading(current_packed_batch())(forward), *args)


def _read_packed(
    forward: Callable[..., Any], layer: nn.Module, signature: inspect.Signature, *args: Any, **kwargs: Any
) -> Any:
    """Read packed rows with a recurrent layer; read other batches by its ``forward``."""
    if (batch := current_packed_batch()) is None:
        return (forward if _WITHOUT_KERNELS.get() is None else _forward_of(layer, False))(*args, **kwargs)
    shape = batch.input_ids_RL.shape
    arranged = _by_chunks(batch) if batch.read_order is None else _in_order(batch.read_order, shape)
    arguments = {
        name: arranged.select(value) if is_per_token(value, *shape) else value
        for name, value in arguments_of(signature, args, kwargs).items()
        if name not in _MASK_PARAMETERS
    }
    outputs = _forward_of(layer, True)(**arguments | {cache_parameter(signature): arranged})
    return tree_map(arranged.restore, outputs)


@dataclass
class _Arrangement:
    """How a recurrent layer reads packed rows, and its cache while it does.

    It has the methods of transformers' `Cache` that recurrent layers call, but no states: convolutions get the inputs
    of earlier tokens by `update_conv_state`, and rules get their states by `_scan`.

    Attributes:
        select: Arranges values of tokens, [R, L, ...].
        restore: Arranges the layer's outputs as the token rows.
        update_conv_state: Returns a convolution's inputs, preceded by the inputs of earlier tokens.
    """

    select: Callable[[torch.Tensor], torch.Tensor]
    restore: Callable[[torch.Tensor], torch.Tensor]
    update_conv_state: Callable[..., torch.Tensor]

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # a layer that recorded no past would write into a state in place

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return recurrent_states


# ---- unpadded rows, paths and rests


def _in_order(order: ReadOrder[torch.Tensor], shape: torch.Size) -> _Arrangement:
    """Let a layer read the long row of an order, which has all tokens."""

    def with_zeros(conv_states: torch.Tensor, *_: Any, conv_kernel_size: int = 0, **__: Any) -> torch.Tensor:
        """Return a convolution's inputs, [1, channels, E], with zeros before the start of a tree."""
        # without a size they are a state, which the layer has computed from zeros where no token is
        return conv_states.masked_fill(order.is_empty_E, 0) if conv_kernel_size else conv_states

    return _Arrangement(
        lambda value: _select(value.flatten(0, 1), order.token_E)[None],
        lambda output: output[0].index_select(0, order.place_T).unflatten(0, shape),
        with_zeros,
    )


def _select(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select entries of the first dimension; zeros for the number after the last entry."""
    return nn.functional.pad(values, (*[0, 0] * (values.dim() - 1), 0, 1)).index_select(0, index)


def _scan_groups(
    order: ReadOrder[torch.Tensor], rule: Callable[..., Any], state: str, args: Any, kwargs: Any
) -> torch.Tensor:
    """Call ``rule`` once per group. Its arguments keep their places: kernels name them in other ways than its code."""
    sizes = [rows * length for rows, length in order.groups]

    def by_group(value: Any) -> list[Any]:
        if not is_per_token(value, 1, len(order.token_E)):
            return [value] * len(order.groups)
        # One selection and one split: the backward of a selection per group would write as many zeros per group.
        parts = _select(value[0], order.source_G).split(sizes)
        return [part.unflatten(0, shape) for part, shape in zip(parts, order.groups, strict=True)]

    leaves, structure = tree_flatten((args, kwargs | {state: None}))
    calls = [tree_unflatten(list(group), structure) for group in zip(*map(by_group, leaves), strict=True)]
    read = [rule(*args, **kwargs) for args, kwargs in calls[: order.paths]]
    initial_N = [None] * len(calls)
    if read:
        states = _select(torch.cat([after for _, after in read]), order.state_N)
        initial_N = states.split([rows for rows, _ in order.groups[order.paths :]])
    for (args, kwargs), initial in zip(calls[order.paths :], initial_N, strict=False):
        read.append(rule(*args, **kwargs | {state: initial}))
    return torch.cat([output.flatten(0, 1) for output, _ in read]).index_select(0, order.target_E)[None]


# ---- planned rows, chunk by chunk


def parents_of_chunks(batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Return the number of each chunk's parent chunk in its token row, [R, M]; -1 for none."""
    assert batch.subtree_end_RL is not None  # packed rows have it
    end_R1M = batch.subtree_end_RL[:, None, ::CHUNK]
    number_M = torch.arange(end_R1M.shape[-1], device=end_R1M.device)
    is_ancestor_RMM = (end_R1M > number_M[:, None] * CHUNK) & (number_M < number_M[:, None])
    return (is_ancestor_RMM * (number_M + 1)).amax(-1) - 1


def _by_chunks(batch: Batch[torch.Tensor]) -> _Arrangement:
    """Let a layer read the chunks of all token rows as a batch. The loop over chunks passes the recurrent states.

    Args:
        batch: Packed rows whose sequences share whole chunks.

    Raises:
        PackingImpossible: If the length is not a multiple of `CHUNK`.
    """
    rows, length = batch.input_ids_RL.shape
    if length % CHUNK:
        raise PackingImpossible(f"recurrent layers read packed rows of a multiple of {CHUNK} tokens (got {length})")
    parent_RM = parents_of_chunks(batch)

    def after_parents(conv_states: torch.Tensor, *_: Any, conv_kernel_size: int = 0, **__: Any) -> torch.Tensor:
        """Return the inputs, [R M, channels, C], with the last inputs of each chunk's parent before them."""
        if not conv_kernel_size:
            raise PackingImpossible("the convolution computes its state itself; planned rows do not support that")
        last_RM = conv_states[..., -conv_kernel_size:].unflatten(0, parent_RM.shape)
        row_R1 = torch.arange(rows, device=conv_states.device)[:, None]
        before_RM = last_RM[row_R1, parent_RM.clamp(min=0)]
        before_RM = torch.where((parent_RM >= 0)[:, :, None, None], before_RM, 0)
        return torch.cat([before_RM.flatten(0, 1), conv_states], dim=-1)

    return _Arrangement(
        lambda value: value.reshape(-1, CHUNK, *value.shape[2:]),
        lambda output: output.reshape(rows, length, *output.shape[2:]),
        after_parents,
    )


def _scan_chunks(
    parent_RM: torch.Tensor, rule: Callable[..., Any], state: str, args: Any, kwargs: Any
) -> torch.Tensor:
    """Call ``rule`` chunk by chunk."""
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
    return outputs_MR.transpose(0, 1).flatten(0, 1)


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
