"""Attention of a model that reads packed rows, by its own attention function with masks or in segments.

Segments attend in one call per layer without a mask: on a GPU, many small kernels would be slow.
"""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..packing.batch import Batch, Segments
from ..packing.pack import TreeLayout
from ..runtime.varlen import varlen_attention, varlen_error
from . import forward
from .forward import OURS, MaskRule, Masks, Outputs, PackedAttention, PackingImpossible, register_attention, tree_masks
from .recurrent_layers import carries_states
from .static_shapes import ExpansionImpossible, scale_of, window_of

# more than rounding in bfloat16, and less than any misplaced key changes
_MAX_ERROR = 0.1
_FLASH = "segments_"  # of names without "flash": transformers would look for a kernel of that name


@dataclass(frozen=True, eq=False)
class InSegments(PackedAttention):
    """Attention of all tails of an unpadded row in one call.

    Attributes:
        segments: The tails.
        window: Number of tokens of its sequence that a token sees, itself included; None for all.
    """

    segments: Segments[torch.Tensor]
    window: int | None

    def attend(self, plain: Callable[..., Outputs], module: nn.Module, *states_BNLD: Any, **kwargs: Any) -> Outputs:
        key_K, query_starts, key_starts, max_queries, max_keys = self.segments
        dtype = _autocast_dtype(key_K.device, states_BNLD[-1].dtype)  # rotary embeddings give float32 under autocast
        query, key, value = (state.to(dtype) for state in states_BNLD)
        key, value = (
            state.squeeze(0).transpose(0, 1).index_select(0, key_K).transpose(0, 1)[None] for state in (key, value)
        )
        # the arguments of transformers' flash attention
        starts = {"cu_seq_lens_q": query_starts, "cu_seq_lens_k": key_starts, "sliding_window": self.window}
        lengths = {"max_length_q": max_queries, "max_length_k": max_keys}
        return plain(module, query, key, value, None, **kwargs | starts | lengths)


def segment_masks(
    otherwise: Callable[..., Any], plain: Masks, batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any
) -> Any:
    """Return an `InSegments` if packed rows have segments and the rule allows it, else the masks of ``otherwise``."""
    if batch.segments is not None and not kwargs.get("use_vmap"):
        with suppress(ExpansionImpossible):
            window = None if rule is causal_mask_function else window_of(rule, batch.segments.max_keys)
            return InSegments(batch.segments, window)
    masks = otherwise(plain, batch, rule, *args, **kwargs)
    if not isinstance(masks, torch.Tensor) or masks.dtype != torch.bool or not forward.few_kernels(masks.device):
        return masks
    # numbers to add: sdpa would convert a boolean mask in each layer
    dtype = _autocast_dtype(masks.device, kwargs["dtype"])
    return torch.zeros_like(masks, dtype=dtype).masked_fill_(~masks, -torch.inf)


def _autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that autocast gives to numbers of ``dtype``."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def sdpa_in_segments(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **kwargs: Any
) -> Any:
    """Attend in segments if there are any, else as sdpa."""
    if (query_starts := kwargs.get("cu_seq_lens_q")) is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    query, key, value = (state.squeeze(0).transpose(0, 1) for state in (query, key, value))
    scale = scale_of(query, kwargs.get("scaling"))
    lengths = query_starts, kwargs["cu_seq_lens_k"], kwargs["max_length_q"], kwargs["max_length_k"]
    return varlen_attention((query, key, value), lengths, scale, kwargs["sliding_window"], dropout)[None], None


class _Changed:
    """An object with other values of some attributes. torch.compile traces no `SimpleNamespace`."""

    def __init__(self, base: Any, **changed: Any) -> None:
        self._base = base
        for name, value in changed.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def flash_in_segments(name: str, module: Any, *args: Any, **kwargs: Any) -> Outputs:
    """Attend with transformers' flash attention ``name``, padded rows or segments."""
    # transformers loads the kernel that the layer's config names, and the config names our implementation
    config, is_causal = _Changed(module.config, _attn_implementation=name), getattr(module, "is_causal", True)
    # without the layer's number, which would be compiled into a program per layer
    layer = _Changed(None, config=config, is_causal=is_causal, modules=module.modules)
    return ALL_ATTENTION_FUNCTIONS[name](layer, *args, **kwargs)


def reject_masks(*_: Any, **__: Any) -> Any:
    raise PackingImpossible("Packed rows need masks here, which flash attention does not take: choose 'sdpa'.")


def use_tree_masks(model: PreTrainedModel) -> None:
    """Let ``model`` build and use masks for packed rows, with the same attention implementation.

    Padded batches get the same masks as before.

    Raises:
        PackingImpossible: The implementation takes neither a mask per query and key nor segments, such as flex
            attention, or the model has its own attention code.
    """
    name = model.config._attn_implementation
    if name.startswith(OURS):
        return
    if (masks := ALL_MASK_ATTENTION_FUNCTIONS.get(name)) is None or name.startswith("flex"):
        raise PackingImpossible(
            f"packed rows need attention that takes a mask, but the model uses {name!r}. Load it with "
            "`attn_implementation=` 'sdpa' or 'eager'"
        )
    if name == "sdpa":
        register_attention(model, name, masks, sdpa_in_segments, partial(segment_masks, tree_masks))
    elif "flash" in name:
        attend, ours = partial(flash_in_segments, name), _FLASH + re.sub(r"flash|\W", "", name)
        register_attention(model, ours, masks, attend, partial(segment_masks, reject_masks))
    else:
        register_attention(model, name, masks, ALL_ATTENTION_FUNCTIONS.get(name, _eager_attention))
    if not model.config._attn_implementation.startswith(OURS):
        raise PackingImpossible(f"{type(model).__name__} does not attend through transformers' attention interface")


def _eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the "eager" attention function of the file that defines the module's class, or a parent class."""
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    eager = next(eager for file in files if (eager := getattr(file, "eager_attention_forward", None)))
    return eager(module, *args, **kwargs)


def tree_layout(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, compiles: bool = False
) -> TreeLayout:
    """Choose how a model reads the trees of unpadded batches.

    Args:
        model: A model that reads packed rows, without adapters.
        device: The device of the batches.
        dtype: The dtype that attention computes in.
        compiles: Whether layers are compiled: one program then has to fit any number of trees.
    """
    is_recurrent = any(map(carries_states, model.modules()))
    name, config = model.config._attn_implementation, model.config.get_text_config()
    if name.startswith(f"{OURS}{_FLASH}"):
        return TreeLayout("segments", is_recurrent)
    if compiles:
        return TreeLayout("rows", is_recurrent)
    if not forward.few_kernels(device):
        return TreeLayout("one by one", is_recurrent)
    layers = [config, *model.modules()]
    sizes = {layer.head_dim for layer in layers[1:] if hasattr(layer, "head_dim")}
    has_kernel = dtype.itemsize == 2 and all(varlen_error(device, dtype, size) < _MAX_ERROR for size in sizes)
    has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    has_short_values = any(hasattr(layer, "v_head_dim") for layer in layers)  # latent attention; the kernel lacks it
    in_segments = name == f"{OURS}sdpa" and sizes and has_kernel and not has_chunks and not has_short_values
    return TreeLayout("segments" if in_segments else "rows", is_recurrent)
