"""Recurrent layers over unpadded rows: each branch of a prefix tree resumes from the state after the shared prefix.

A layer is called once per node of the prefix trees. A node is a stretch of tokens without a branch, and its call gets
a cache that holds the states after its parent node. All other modules of the model read the whole row. Results are
exact in float64 for every family of transformers 5.23 whose scan takes an initial state.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..packing.batch import Batch, Tree
from .chunk_states import call_by_chunks
from .forward import current_packed_batch, reading
from .head_spec import is_wrapped, wrap_forward
from .recurrent_layers import LayerCall, States, carries_states


class Node(NamedTuple):
    """A stretch of a row's tokens without a branch, as a range of the row's columns.

    Attributes:
        parent: Number of the node that this one continues; -1 for the first node of a tree.
    """

    start: int
    stop: int
    parent: int


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
    """Call a layer's ``forward`` once per node of the row, or once for a batch that is not packed."""
    batch = current_packed_batch()
    if batch is None:
        return forward(*args, **kwargs)
    call = LayerCall.of(forward, signature, args, kwargs, batch.input_ids_RL.shape)
    if batch.trees is None:
        return call_by_chunks(call, batch)
    nodes = nodes_of(batch.trees)
    # One split of the whole row: the backward of separate slices would write a row of zeros per slice.
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
