"""A decoder's last layer, for the tokens that are scored and no others.

A reward is read at the last token of a dialogue, and above the last attention no token sees another. So in the
last layer everything but keys and values, which is most of its work, matters for scored tokens only: two tokens a pair
in place of hundreds. What comes out for the others is wrong, and nobody reads it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .tree_by_tree import TreeMasks

# The parts of a layer that work for queries alone, by transformers' names.
_FOR_QUERIES = {"q_proj", "o_proj", "mlp"}


@contextmanager
def scored_only(model: nn.Module, scored: Sequence[int], length: int) -> Iterator[None]:
    """While open, the last layer of ``model`` computes the columns ``scored``, ascending, of one row of ``length``.

    A model whose layers are of an unknown make computes all as ever. So does one that computes its layers again in the
    backward (activation checkpointing), since that comes when this is closed.
    """
    layer = _last_layer(model)
    if layer is None or (layer.gradient_checkpointing and layer.training):
        yield
        return
    columns_S = torch.tensor(scored, device=next(model.parameters()).device)

    def narrow_mask(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        masks = kwargs.get("attention_mask")
        if isinstance(masks, TreeMasks):
            kwargs = kwargs | {"attention_mask": masks.for_queries(scored)}
        return args, kwargs

    def gather(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].index_select(1, columns_S), *args[1:])

    def scatter(_module: nn.Module, _args: tuple[Any, ...], output_1SH: torch.Tensor) -> torch.Tensor:
        return output_1SH.new_zeros((1, length, *output_1SH.shape[2:])).index_copy(1, columns_S, output_1SH)

    hooks = [layer.register_forward_pre_hook(narrow_mask, with_kwargs=True)]
    for name, module in layer.named_modules():
        if name.rpartition(".")[2] in _FOR_QUERIES:
            hooks += [module.register_forward_pre_hook(gather), module.register_forward_hook(scatter)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _last_layer(model: nn.Module) -> GradientCheckpointingLayer | None:
    """The last decoder layer, where the model's layers are made as nearly all of transformers' are."""
    bases = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    config: Any = next(bases).config.get_text_config()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    alike = all(isinstance(getattr(layer, "mlp", None), nn.Module) for layer in layers)
    return layers[-1] if layers and alike and len(layers) == config.num_hidden_layers else None
