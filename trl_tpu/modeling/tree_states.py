"""Recurrent layers over packed rows: each branch of a prefix tree resumes from the state after the shared prefix.

Linear attention (Gated DeltaNet, KDA), state-space layers and short convolutions carry a state from token to token.
When transformers generates text, such a layer reads its state from the cache and writes the next state back. Here the
layer is called once per node of the prefix trees. A node is a stretch of tokens without a branch, and its call gets a
cache that holds the states after its parent node. All other modules of the model read the whole row. No model code is
copied.

Results are exact in float64 for every family of transformers 5.23 whose scan takes an initial state. A trial before
training rejects all other families (`packability.check_packing_is_exact`).
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..packing.batch import Tree
from ..packing.shapes import CHUNK
from .chunk_states import States, call_by_chunks
from .forward import current_packed_batch, reading
from .head_spec import is_wrapped, wrap_forward

# A layer that calls one of these methods carries states. Attention layers update keys and values instead.
_STATE_UPDATES = {"update_conv_state", "update_recurrent_state"}
# names of a layer's cache parameter: `cache` since transformers 5.24
_CACHE_PARAMETERS = ("cache", "cache_params", "past_key_values")
_MASK_PARAMETERS = ("attention_mask", "conv_mask")


class Node(NamedTuple):
    """A stretch of a row's tokens without a branch, as a range of the row's columns."""

    start: int
    stop: int
    parent: int
    """Number of the node that this one continues; -1 for the first node of a tree."""


@lru_cache(maxsize=2)  # each recurrent layer needs the same nodes
def nodes_of(trees: tuple[Tree, ...]) -> tuple[Node, ...]:
    """Split trees into nodes in the order of the row: a parent comes before its children."""
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


def carries_states(module: nn.Module) -> bool:
    """Return whether the code of a layer's forward updates states in transformers' caches."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return bool(_STATE_UPDATES & set(getattr(code, "co_names", ())))


def shared_chunk(model: nn.Module) -> int:
    """Return the granularity of shared prefixes in planned rows, in tokens: `CHUNK` with recurrent layers, else 1."""
    return CHUNK if any(map(carries_states, model.modules())) else 1


def call_with_states(layer: nn.Module, hidden_1LH: torch.Tensor, states: States) -> Any:
    """Call a recurrent layer with ``states``; the layer replaces them by the states after these tokens."""
    return layer(hidden_1LH, **{_cache_parameter(inspect.signature(layer.forward)): states})


def _cache_parameter(forward: inspect.Signature) -> str:
    """Return the name of the layer's cache parameter."""
    return next(name for name in _CACHE_PARAMETERS if name in forward.parameters)


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
    batch = current_packed_batch()

    def forward_in_batch(*args: Any, **kwargs: Any) -> Any:
        with reading(batch):
            return forward(*args, **kwargs)

    return checkpoint(forward_in_batch, *args, **kwargs)


def _read_by_nodes(
    forward: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Call a layer's ``forward`` once per node of the row, or once for a batch that is not packed."""
    batch = current_packed_batch()
    if batch is None:
        return forward(*args, **kwargs)
    arguments = signature.bind(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    tokens = dict[str, torch.Tensor]()  # arguments with a value per token of the row
    shape = batch.input_ids_RL.shape
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape and name not in _MASK_PARAMETERS:
            tokens[name] = value
    cache = _cache_parameter(signature)
    others = {name: value for name, value in arguments.items() if name not in (*tokens, *_MASK_PARAMETERS, cache)}
    if batch.trees is None:
        return call_by_chunks(forward, batch, cache, tokens, others)
    nodes = nodes_of(batch.trees)
    # One split of the whole row: the backward of separate slices would write a row of zeros per slice.
    parts = {name: value.split([node.stop - node.start for node in nodes], dim=1) for name, value in tokens.items()}
    states, lone_tokens, outputs = list[States](), list[Mapping[str, torch.Tensor]](), list[Any]()
    for number, node in enumerate(nodes):
        inputs: Mapping[str, torch.Tensor] = {name: values[number] for name, values in parts.items()}
        before = States(states[node.parent]) if node.parent >= 0 else States()
        skipped = 0
        if node.parent >= 0 and (first := lone_tokens[node.parent]):
            skipped = next(iter(first.values())).shape[1]
            inputs = {name: torch.cat([first[name], value], dim=1) for name, value in inputs.items()}
        # A layer would read a lone token with a state as a step of generation, by kernels without a backward. So the
        # token is read twice, its own state is not kept, and its children read the token again.
        is_lone = node.parent >= 0 and skipped + node.stop - node.start == 1
        read = {name: torch.cat([value, value], dim=1) for name, value in inputs.items()} if is_lone else inputs
        after = States(before)
        output = forward(**read, **others, **{cache: after})
        part = slice(skipped, skipped + node.stop - node.start)
        outputs.append(tuple(tensor[:, part] for tensor in output) if isinstance(output, tuple) else output[:, part])
        states.append(before if is_lone else after)
        lone_tokens.append(inputs if is_lone else {})
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(tensors, dim=1) for tensors in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=1)
