"""Attention and products in plain torch, for every device: what faster kernels of an accelerator must equal.

Letters: B rows, H query heads, G key and value heads, L length, D size of a head.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


@torch.library.custom_op("trl_tpu::einsum", mutates_args=())
def einsum(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `torch.einsum` of two tensors, each letter of one being in the other or in the result.

    An operation of its own, so that it can be kept when a layer is recomputed: torch_xla's einsum is not seen below
    autograd, and torch's own joins dimensions that are sharded apart.
    """
    return torch.einsum(equation, first, second).contiguous()


@einsum.register_fake
def _(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, first, second).contiguous()


def _keep_factors(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.equation, *factors = inputs
    ctx.save_for_backward(*factors)


def _einsum_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    first, second = ctx.saved_tensors
    letters, result = ctx.equation.split("->")
    one, two = letters.split(",")
    return (
        None,
        einsum(f"{result},{two}->{one}", gradient, second) if ctx.needs_input_grad[1] else None,
        einsum(f"{result},{one}->{two}", gradient, first) if ctx.needs_input_grad[2] else None,
    )


einsum.register_autograd(_einsum_backward, setup_context=_keep_factors)

_aten = torch.ops.aten
#: Every operation that multiplies matrices.
MATMULS = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        torch.ops.trl_tpu.einsum.default,
    }
)


def segment_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    segment_BL: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within the segments of each row, [B, H, L, D].

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
    """Compute attention under a boolean mask, [B, H, L, D]. A query that may see nothing gives no number.

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
