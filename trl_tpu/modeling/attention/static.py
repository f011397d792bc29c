"""Attends in a way that XLA can trace: with masks built on the device, whatever their values.

transformers' sdpa path reads the padding mask on the host to see whether it can be left out. On XLA that stops the
device in every forward and picks the program by the data. Here the mask is always built.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...runtime.kernels.plain import einsum
from .masked import TreeMask, attend_by


def static_sdpa_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Build transformers' boolean mask, never skipped. A position that would see nothing sees itself."""
    mask_BHQK = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))
    if mask_BHQK is None or mask_BHQK.shape[-1] != mask_BHQK.shape[-2]:
        return mask_BHQK
    itself_QK = torch.eye(mask_BHQK.shape[-1], dtype=torch.bool, device=mask_BHQK.device)
    return mask_BHQK | (itself_QK & ~mask_BHQK.any(dim=-1, keepdim=True))


def static_sdpa_attention(
    module: nn.Module,
    query_BNQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from N query heads to G key heads, [B, Q, N, D], with batch and heads as dimensions of their own.

    torch's sdpa joins the two into one, which no sharding over both can follow: each device would compute every head.
    Rotary embeddings leave query and key in float32 under autocast; products are in the values' type, softmax in
    float32 or wider.
    """
    query_BNQD, key_BGKD = query_BNQD.to(value_BGKD.dtype), key_BGKD.to(value_BGKD.dtype)
    if attention_mask is None or kwargs.get("position_bias") is not None:
        plain = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query_BNQD, key_BGKD, value_BGKD, attention_mask, **plain)
    groups = key_BGKD.shape[1]
    query = query_BNQD.unflatten(1, (groups, -1))
    mask = attention_mask.unflatten(1, (groups, -1)) if attention_mask.shape[1] > 1 else attention_mask.unsqueeze(1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = einsum("bghqd,bgkd->bghqk", query * scale, key_BGKD)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    is_rule = mask.dtype == torch.bool
    masked = wide.masked_fill(~mask, torch.finfo(wide.dtype).min) if is_rule else wide + mask
    weights = F.dropout(masked.softmax(-1), dropout).to(value_BGKD.dtype)
    outputs = einsum("bghqk,bgkd->bghqd", weights, value_BGKD)
    return outputs.flatten(1, 2).transpose(1, 2).contiguous(), None


def use_static_attention(model: PreTrainedModel) -> None:
    """Give ``model`` the attention above in the place of sdpa; eager attention and others stay."""
    if model.config._attn_implementation == "sdpa":
        attend_by(model, "static", TreeMask(static_sdpa_mask), static_sdpa_attention)
