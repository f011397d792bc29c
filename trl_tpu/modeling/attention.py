"""Attention that XLA can trace: masks built on the device, whatever their values.

transformers' sdpa path reads the padding mask on the host to see whether it can be left out. On XLA that stops the
device in every forward and picks the program by the data. Here the mask is always built.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

STATIC_SDPA = "static_sdpa"


def static_sdpa_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' boolean mask, never skipped. A position always sees itself, so that no row is empty."""
    mask_BHQK = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))
    if mask_BHQK is None or mask_BHQK.shape[-1] != mask_BHQK.shape[-2]:
        return mask_BHQK
    return mask_BHQK | torch.eye(mask_BHQK.shape[-1], dtype=torch.bool, device=mask_BHQK.device)


def static_sdpa_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """sdpa under any autocast: rotary embeddings leave query and key in float32, and XLA's sdpa wants one dtype."""
    return sdpa_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, *args, **kwargs)


def use_static_attention(model: PreTrainedModel) -> None:
    """Give ``model`` the attention above in the place of sdpa; eager attention and others stay."""
    AttentionInterface.register(STATIC_SDPA, static_sdpa_attention)
    AttentionMaskInterface.register(STATIC_SDPA, static_sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(STATIC_SDPA)
