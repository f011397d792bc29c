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
   Planned rows replace these rules in a copy of the layer's forward (`replace_rules`): the module itself
   belongs to all models of the process.
5. A call with a state and one token is a step of generation (`_read_node`).

`tests/unit/test_recurrent_layers.py` lists the layers that this finds and misses in transformers' source. The list is
not used here: unlisted families qualify alike, by the trial `packability.check_packing_is_exact`. It rejects a model
if one of its layers was missed, or takes no initial state.

In unpadded rows, each branch of a prefix tree resumes from the state after the shared prefix. A layer is called once
per node of the prefix trees. A node is a stretch of tokens without a branch, and its call gets a cache that holds the
states after its parent node. All other modules of the model read the whole row. Results are exact in float64 for every
family of transformers 5.23 whose scan takes an initial state.

A device that compiles once per shape cannot split token rows at data-dependent branches. Instead every planned row
is split into chunks of `CHUNK` tokens, and sequences share whole chunks only (`Sequences.chunk`). A chunk then
continues exactly one other chunk of its row, or none. The layer's own forward is called once, with the chunks of all
token rows as its batch:

- A convolution takes its last inputs from the parent chunk, through the layer's cache.
- The rule that carries the recurrent state runs as a loop over the chunks of a token row. All rows advance together.

Letters: R token rows, M chunks per token row, C tokens per chunk.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from ..packing.batch import Batch, Tree
from ..packing.shapes import CHUNK
from ..runtime import current
from .forward import PackingImpossible, current_packed_batch, reading
from .head_spec import is_wrapped, wrap_forward

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
        """Sort the arguments of a layer's ``forward`` that reads token rows of a shape."""
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
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Store the last inputs of a convolution, and return the inputs with the parent's last inputs before them."""
        before, inputs = self._states.get(("conv", state_idx)), conv_states
        if (size := kwargs.get("conv_kernel_size")) is not None:  # else `conv_states` is the state, not the inputs
            inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
            last = inputs[..., -size:]
            conv_states = nn.functional.pad(last, (size - last.shape[-1], 0))
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


# ---- unpadded rows, node by node


class Node(NamedTuple):
    """A stretch of an unpadded row's tokens without a branch, as a range of its columns.

    Attributes:
        parent: Number of the node that this one continues; -1 for the first node of a tree.
    """

    start: int
    stop: int
    parent: int


@lru_cache(maxsize=2)  # each recurrent layer needs the same nodes
def nodes_of(trees: tuple[Tree, ...]) -> tuple[Node, ...]:
    """Split trees into nodes in the order of the unpadded row: a parent comes before its children."""
    nodes = list[Node]()
    for tree in trees:
        branch_columns = {tail.start: tail.path[-1][1] if tail.path else -1 for tail in tree.tails}
        boundaries = sorted({*branch_columns, *branch_columns.values(), *(tail.stop for tail in tree.tails)} - {-1})
        number_by_stop = dict[int, int]()
        for start, stop in zip(boundaries, boundaries[1:], strict=False):
            parent = number_by_stop.get(branch_columns.get(start, start), -1)
            number_by_stop[stop] = len(nodes)
            nodes.append(Node(tree.start + start, tree.start + stop, parent))
    return tuple(nodes)


def use_tree_states(model: nn.Module) -> bool:
    """Let the recurrent layers of ``model`` read packed rows node by node. Other batches are read as before.

    Returns:
        Whether the model has recurrent layers.
    """
    layers = [module for module in model.modules() if carries_states(module)]
    for layer in layers:
        wrap_forward(layer, _read_by_nodes, inspect.signature(layer.forward))
    return bool(layers)


def restore_layer_forwards(model: nn.Module) -> None:
    """Restore the forwards that `use_tree_states` wrapped."""
    for module in model.modules():
        if is_wrapped(module, _read_by_nodes):
            module.forward = module.forward.__wrapped__  # type: ignore[union-attr, attr-defined]


def recompute_in_same_batch(model: nn.Module) -> None:
    """Let recurrent layers that the backward recomputes read the batch of their forward, in any thread.

    Call it once the layers have their checkpointing functions.
    """
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and any(is_wrapped(part, _read_by_nodes) for part in module.modules()):
            module._gradient_checkpointing_func = partial(_checkpoint_in_batch, checkpoint)  # type: ignore[assignment]


def _checkpoint_in_batch(
    checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    call = partial(forward)  # with the keywords of a partial `forward`: on XLA, some are inputs with a gradient
    in_batch = partial(_call_in_batch, current_packed_batch(), call.func, *call.args, **call.keywords)
    return checkpoint(in_batch, *args, **kwargs)


def _call_in_batch(batch: Batch[Any] | None, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with reading(batch):
        return forward(*args, **kwargs)


def _read_by_nodes(forward: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's ``forward`` once per node of the unpadded row, or once for a batch that is not packed."""
    batch = current_packed_batch()
    if batch is None:
        return forward(*args, **kwargs)
    call = LayerCall.of(forward, signature, args, kwargs, batch.input_ids_RL.shape)
    if batch.trees is None:
        return call_by_chunks(call, batch)
    nodes = nodes_of(batch.trees)
    # One split of the whole row: the backward of separate slices would write as many zeros per slice.
    sizes = [node.stop - node.start for node in nodes]
    values = zip(*(value.split(sizes, dim=1) for value in call.tokens.values()), strict=True)
    outputs, after_nodes = list[Any](), [_After(None, {})]  # first what comes before a tree's first node
    for node, parts in zip(nodes, values, strict=True):
        tokens = dict(zip(call.tokens, parts, strict=True))
        output, after = _read_node(call, tokens, *after_nodes[node.parent + 1])
        outputs.append(output)
        after_nodes.append(after)
    return tree_map(lambda *parts: torch.cat(parts, dim=1), *outputs)


class _After(NamedTuple):
    """What the children of a node continue.

    Attributes:
        unread: The node's token if ``states`` do not contain it.
    """

    states: States | None
    unread: Mapping[str, torch.Tensor]


def _read_node(
    call: LayerCall, tokens: Mapping[str, torch.Tensor], before: States | None, unread: Mapping[str, torch.Tensor]
) -> tuple[Any, _After]:
    """Read a node's tokens, and return the layer's output for them.

    A layer would read a lone token with a state as a step of generation, by kernels without a backward. So the token
    is read twice, its own state is not kept, and the node's children read the token again.
    """
    inputs = {name: torch.cat([unread[name], value], dim=1) for name, value in tokens.items()} if unread else tokens
    length, size = (next(iter(values.values())).shape[1] for values in (inputs, tokens))
    is_lone, after = before is not None and length == 1, States(before)
    read = {name: torch.cat([value, value], dim=1) for name, value in inputs.items()} if is_lone else inputs
    output = tree_map(lambda part: part[:, length - size : length], call.read(read, after))
    return output, _After(before, inputs) if is_lone else _After(after, {})


# ---- planned rows, chunk by chunk


def parents_of_chunks(batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Return the number of each chunk's parent chunk in its token row, [R, M]; -1 for none."""
    assert batch.subtree_end_RL is not None  # packed rows have it
    end_R1M = batch.subtree_end_RL[:, None, ::CHUNK]
    number_M = torch.arange(end_R1M.shape[-1], device=end_R1M.device)
    is_ancestor_RMM = (end_R1M > number_M[:, None] * CHUNK) & (number_M < number_M[:, None])
    return (is_ancestor_RMM * (number_M + 1)).amax(-1) - 1


def call_by_chunks(call: LayerCall, batch: Batch[torch.Tensor]) -> Any:
    """Call a recurrent layer's own forward with the chunks of all token rows as its batch.

    Args:
        call: The layer's call for the whole token rows.
        batch: Packed rows whose sequences share whole chunks.

    Raises:
        PackingImpossible: If the length is not a multiple of `CHUNK`, or a convolution computes its state itself.
    """
    rows, length = batch.input_ids_RL.shape
    if length % CHUNK:
        raise PackingImpossible(f"recurrent layers read packed rows of a multiple of {CHUNK} tokens (got {length})")
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
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Return the inputs, [R M, channels, C], with the last inputs of each chunk's parent before them."""
        if (size := kwargs.get("conv_kernel_size")) is None:
            raise PackingImpossible("the convolution computes its state itself; planned rows do not support that")
        rows, count = self._parent_RM.shape
        last_RM = conv_states[..., -size:].unflatten(0, (rows, count))
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
