"""Causal attention in segments of any lengths, in one kernel."""

import functools
import math

import torch

from .native import masked_attention


def varlen_attention(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: tuple[torch.Tensor, torch.Tensor, int, int],
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute causal attention in segments, [Q, H, D]: the last query of a segment sees the segment's last key.

    On CUDA it is torch's flash attention. `torch.nn.attention.varlen` calls the same operation, but takes a window
    only since torch 2.11. Elsewhere it is a loop over segments, for tests.

    Args:
        states: Queries [Q, H, D], keys and values [K, G, D] of all segments; H is a multiple of G.
        lengths: First query and first key of each segment, and the number of queries and keys, int32 [N + 1] each;
            most queries and most keys of a segment.
        scale: Factor of the logits.
        window: Number of keys that a query sees, its own included; None for all.
        dropout: Share of the attention weights that is dropped.
    """
    if states[0].device.type in ("cuda", "meta"):
        sides = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
        attend = torch.ops.aten._flash_attention_forward
        return attend(*states, *lengths, dropout, window is None, False, scale=scale, **sides)[0]
    outputs, (query_starts, key_starts, *_) = list[torch.Tensor](), lengths
    starts = zip(states, (query_starts, key_starts, key_starts), strict=True)
    segments = [state.transpose(0, 1)[None].split(start.diff().tolist(), dim=2) for state, start in starts]
    for query, key, value in zip(*segments, strict=True):
        before = key.shape[2] - query.shape[2]
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(before)
        mask = mask if window is None else mask.triu(before - window + 1)
        outputs.append(masked_attention(query, key, value, mask, scale)[0].transpose(0, 1))
    return torch.cat(outputs)


@functools.cache
@torch.enable_grad()
def varlen_error(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Return the relative error of `varlen_attention` and its gradients on ``device``; infinite without a kernel.

    It is compared with masks, with and without a window. Only a GPU can show that its kernel aligns both to the last
    key of a segment, and that it has gradients. Aligned to the first key, the error is about 1.
    """
    numbers = torch.arange(110 * head_dim, device=device).view(110, 1, head_dim).sin().to(dtype).requires_grad_()
    query, key = numbers.split([40, 70])
    queries, keys = torch.tensor([[0, 40], [0, 70]], dtype=torch.int32, device=device)
    causal, errors = torch.ones(40, 70, dtype=torch.bool, device=device).tril(30), list[torch.Tensor]()
    for window, mask in ((None, causal), (16, causal.triu(15))):
        q_HLD, k_HLD = query.transpose(0, 1), key.transpose(0, 1)
        expected = masked_attention(q_HLD, k_HLD, k_HLD, mask, 0.1).transpose(0, 1)
        try:
            computed = varlen_attention((query, key, key), (queries, keys, 40, 70), 0.1, window)
            both = [(output, *torch.autograd.grad(output, numbers, query.detach())) for output in (computed, expected)]
        except RuntimeError:
            return math.inf
        errors += [(found - exact).abs().max() / exact.abs().max() for found, exact in zip(*both, strict=True)]
    return torch.stack(errors).max().item()
