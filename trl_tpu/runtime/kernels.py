"""Attention in plain torch, for every device: what the faster kernels of an accelerator must equal.

Letters: B rows, H query heads, G key and value heads, L length, D size of a head.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def segment_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    segment_BL: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention within the segments of each row, [B, H, L, D].

    Args:
        q_BHLD, k_BGLD, v_BGLD: Queries, keys and values; H is a multiple of G.
        segment_BL: A token sees those with its own number only.
        scale: Of the logits.
        window: How many tokens a token sees, itself among them, counted in columns; None for all.
        softcap: The bound that tanh puts on the logits; None for none.
    """
    column = torch.arange(segment_BL.shape[1], device=segment_BL.device)
    before_LL = column[:, None] - column[None, :]
    seen_LL = before_LL >= 0 if window is None else (before_LL >= 0) & (before_LL < window)
    mask_B1LL = (segment_BL[:, None, :, None] == segment_BL[:, None, None, :]) & seen_LL
    return masked_attention(q_BHLD, k_BGLD, v_BGLD, mask_B1LL, scale, softcap)


def masked_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    mask_B1LL: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention under a boolean mask, [B, H, L, D]. A query that may see nothing gives no number.

    Args:
        q_BHLD, k_BGLD, v_BGLD, scale, softcap: As in `segment_attention`.
        mask_B1LL: True where a query sees a key.
    """
    groups = q_BHLD.shape[1] // k_BGLD.shape[1]
    if groups > 1:
        k_BGLD, v_BGLD = k_BGLD.repeat_interleave(groups, 1), v_BGLD.repeat_interleave(groups, 1)
    if softcap is None:
        return scaled_dot_product_attention(q_BHLD, k_BGLD, v_BGLD, attn_mask=mask_B1LL, scale=scale)
    logits_BHLL = (q_BHLD @ k_BGLD.mT * scale / softcap).tanh() * softcap
    wide = torch.promote_types(logits_BHLL.dtype, torch.float32)
    weights_BHLL = logits_BHLL.masked_fill(~mask_B1LL, -torch.inf).softmax(-1, dtype=wide)
    return weights_BHLL.to(v_BGLD.dtype) @ v_BGLD
