"""Recurrent layers over packed rows: where sequences branch, each goes on from the state of what they share.

Linear attention (Gated DeltaNet, KDA), state-space layers and short convolutions carry a state from token to token.
When transformers generates text, such a layer takes its state from the cache and hands the next one back. Here it is
called once for each node of the prefix trees, a stretch of tokens without a branch, with a cache that holds the
states of the node's parent. Everything else of a model reads the whole row. No code of a model is copied.

Exact in float64 for every family of transformers 5.23 whose scan takes an initial state; a trial before training
rejects the others (`packability.check_packing_is_exact`).
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..packing.batch import Tree
from ..packing.shapes import CHUNK
from .chunk_states import call_by_chunks
from .forward import batch_being_read, reading
from .head_spec import is_wrapped, wrap_forward

# A layer that calls one of these carries states. Attention layers update keys and values instead.
_CARRYING = {"update_conv_state", "update_recurrent_state"}
_CACHES = ("cache", "cache_params", "past_key_values")  # transformers 5.24 calls it the first, before it the others
_MASKS = ("attention_mask", "conv_mask")


class Node(NamedTuple):
    """Tokens of a row without a branch between them, in columns of the row."""

    start: int
    stop: int
    parent: int
    """The number of the node before it in its sequences; -1 if there is none."""


@lru_cache(maxsize=2)  # each recurrent layer asks
def nodes_of(trees: tuple[Tree, ...]) -> tuple[Node, ...]:
    """Cut trees into nodes, in the order of the row, so that a parent comes before its children."""
    nodes = list[Node]()
    for tree in trees:
        begins = {tail.start: tail.path[-1][1] if tail.path else -1 for tail in tree.tails}
        cuts = sorted({*begins, *begins.values(), *(tail.stop for tail in tree.tails)} - {-1})
        number_by_stop = dict[int, int]()
        for start, stop in zip(cuts, cuts[1:], strict=False):
            parent = number_by_stop.get(begins.get(start, start), -1)
            number_by_stop[stop] = len(nodes)
            nodes.append(Node(tree.start + start, tree.start + stop, parent))
    return tuple(nodes)


class States:
    """What a layer is given for a cache: the states after the parent node, which it replaces by those after its own.

    The methods are those of transformers' `Cache` that recurrent layers call.
    """

    def __init__(self, before: "States | None" = None) -> None:
        self._conv: dict[int, torch.Tensor] = dict(before._conv) if before else {}
        self._recurrent: dict[int, torch.Tensor] = dict(before._recurrent) if before else {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent.get(state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # so that no layer writes into a state in place

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution, and return these inputs after those of the parent."""
        if conv_kernel_size is None:  # the layer hands over the state itself
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


def carries_states(module: nn.Module) -> bool:
    """Tell whether a layer carries states by the protocol of transformers' caches: its own code says so."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return bool(_CARRYING & set(getattr(code, "co_names", ())))


def shared_chunk(model: nn.Module) -> int:
    """Return how many tokens sequences of planned rows share at a time: `CHUNK` with recurrent layers, else 1."""
    return CHUNK if any(map(carries_states, model.modules())) else 1


def call_with_states(layer: nn.Module, hidden_1LH: torch.Tensor, states: States) -> Any:
    """Call a layer that carries states with some of them, which it replaces by those after these tokens."""
    return layer(hidden_1LH, **{_cache_of(inspect.signature(layer.forward)): states})


def _cache_of(forward: inspect.Signature) -> str:
    """Return the name of the parameter by which a layer is given its states."""
    return next(name for name in _CACHES if name in forward.parameters)


def use_tree_states(model: nn.Module) -> bool:
    """Let recurrent layers of ``model`` read packed rows node by node, and all else as before.

    Returns:
        Whether the model has such layers.
    """
    layers = [module for module in model.modules() if carries_states(module)]
    for layer in layers:
        wrap_forward(layer, _read_by_nodes, inspect.signature(layer.forward))
    return bool(layers)


def forget_tree_states(model: nn.Module) -> None:
    """Undo `use_tree_states`."""
    for module in model.modules():
        if is_wrapped(module, _read_by_nodes):
            module.forward = module.forward.__wrapped__  # type: ignore[union-attr, attr-defined]


def recompute_in_same_batch(model: nn.Module) -> None:
    """Let recurrent layers that the backward computes again read the batch that they read at first, in any thread.

    Called once layers have their checkpointing functions.
    """
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and any(is_wrapped(each, _read_by_nodes) for each in module.modules()):
            module._gradient_checkpointing_func = partial(_checkpoint_in_batch, checkpoint)  # type: ignore[assignment]


def _checkpoint_in_batch(
    checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    batch = batch_being_read()

    def forward_in_batch(*args: Any, **kwargs: Any) -> Any:
        with reading(batch):
            return forward(*args, **kwargs)

    return checkpoint(forward_in_batch, *args, **kwargs)


def _read_by_nodes(
    forward: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Call a layer's own ``forward`` for each node of the row, or once for a batch that is not packed."""
    batch = batch_being_read()
    if batch is None:
        return forward(*args, **kwargs)
    given = signature.bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    tokens = dict[str, torch.Tensor]()  # what has a value for each token of the row
    shape = batch.input_ids_RL.shape
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape and name not in _MASKS:
            tokens[name] = value
    cache = _cache_of(signature)
    others = {name: value for name, value in given.items() if name not in (*tokens, *_MASKS, cache)}
    if batch.trees is None:
        return call_by_chunks(forward, batch, cache, tokens, others)
    nodes = nodes_of(batch.trees)
    # split at once: the backward of slices would write a row of zeros for each
    parts = {name: value.split([node.stop - node.start for node in nodes], dim=1) for name, value in tokens.items()}
    states, unread, outputs = list[States](), list[Mapping[str, torch.Tensor]](), list[Any]()
    for number, node in enumerate(nodes):
        own: Mapping[str, torch.Tensor] = {name: values[number] for name, values in parts.items()}
        before = States(states[node.parent]) if node.parent >= 0 else States()
        skipped = 0
        if node.parent >= 0 and (first := unread[node.parent]):
            skipped = next(iter(first.values())).shape[1]
            own = {name: torch.cat([first[name], value], dim=1) for name, value in own.items()}
        # A lone token with a state would be a step of generation, with kernels that have no backward. A second token
        # is put behind it, and its children read it once more.
        is_lone = node.parent >= 0 and skipped + node.stop - node.start == 1
        read = {name: torch.cat([value, value], dim=1) for name, value in own.items()} if is_lone else own
        after = States(before)
        output = forward(**read, **others, **{cache: after})
        part = slice(skipped, skipped + node.stop - node.start)
        outputs.append(tuple(each[:, part] for each in output) if isinstance(output, tuple) else output[:, part])
        states.append(before if is_lone else after)
        unread.append(own if is_lone else {})
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(each, dim=1) for each in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=1)
