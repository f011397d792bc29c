"""The backward of splash attention as one kernel, in Pallas, that computes the weights of a block once.

jax's own takes two kernels, for gradients of queries and for those of keys and values, and each computes weights and
their gradients for itself: seven products of a block, where five will do. Its fused one takes five, and writes
gradients of queries once for every block of keys, which is memory that grows with the square of the length. Here the
gradients of a row stay in the chip's own memory until they are whole, if it is no longer than
`blocks.has_fused_backward` says.
https://arxiv.org/abs/2307.08691 (FlashAttention-2, algorithm 2) Only imported where jax is.

Letters: H query heads, G key and value heads, T the tokens of all rows end to end, D size of a head; of one row N
blocks, and W places in the list of a block of keys, which name the blocks of queries that see it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .blocks import LANES, block_size, row_bytes

_SUBLANES = 8
_FOR_BLOCKS = 16 * 2**20
"""For blocks of what comes in, and products of two."""
_FIRST_WITH_FIRST = (((0,), (0,)), ((), ()))
_LAST_WITH_LAST = (((1,), (1,)), ((), ()))


def gradients_of(
    kernel: Any, tensors: tuple[Any, ...], segments: Any, numbers: tuple[Any, Any], rows: int, window: int | None
) -> Any:
    """Gradients of queries, keys and values, [H or G, T, D], through ``kernel``, a SplashAttentionKernel.

    Args:
        tensors: Queries, keys and values, and the gradient of what it returned.
        segments: Its SegmentIds.
        numbers: Of each query, [H, T]: the logsumexp of its logits, which the kernel returned too, and the product of
            its output with the gradient.
        rows: How many rows the tokens are of.
        window: How many tokens a token sees; None for all.
    """
    q, k, v, gradient = tensors
    logsumexp_HT, weighed_HT = numbers
    (heads, tokens, keys), (groups, _, values) = q.shape, v.shape
    length = tokens // rows
    block = block_size(length)
    at = _Places(heads // groups, length // block, kernel.dkv_mask_info)
    of_queries = pl.BlockSpec((None, _SUBLANES, block), at.lanes_of_queries)
    return pl.pallas_call(
        functools.partial(
            _block,
            at=at,
            window=window,
            softcap=kernel.kwargs["attn_logits_soft_cap"],
            masked=kernel.kwargs["mask_value"],
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, rows, at.in_group, at.blocks, at.width),
            in_specs=[
                pl.BlockSpec((None, block, keys), at.queries),
                pl.BlockSpec((None, block, keys), at.keys),
                pl.BlockSpec((None, block, values), at.keys),
                pl.BlockSpec((_SUBLANES, block), lambda *step: at.lanes_of_queries(*step)[1:]),
                pl.BlockSpec((block, LANES), lambda *step: at.keys(*step)[1:]),
                of_queries,
                pl.BlockSpec((None, block, values), at.queries),
                of_queries,
            ],
            out_specs=[
                pl.BlockSpec((None, length, keys), at.row_of_queries),
                pl.BlockSpec((None, length, keys), at.row_of_keys),
                pl.BlockSpec((None, length, values), at.row_of_keys),
            ],
            scratch_shapes=[pltpu.VMEM((length, size), jnp.float32) for size in (keys, keys, values)],
        ),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (q, k, v)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *["arbitrary"] * 4),
            vmem_limit_bytes=row_bytes(length, (keys, values), q.dtype.itemsize) + _FOR_BLOCKS,
        ),
        name="splash_backward",
        interpret=kernel.kwargs["interpret"],
    )(
        *at.lists,
        q,
        k,
        v,
        jnp.broadcast_to(segments.q, (_SUBLANES, tokens)),
        jnp.broadcast_to(segments.kv[:, None], (tokens, LANES)),
        jnp.broadcast_to(logsumexp_HT[:, None], (heads, _SUBLANES, tokens)),
        gradient,
        jnp.broadcast_to(weighed_HT[:, None], (heads, _SUBLANES, tokens)),
    )


class _Places:
    """Which blocks a step of the grid takes: its group, row, head of the group, block of keys, and place in that
    block's list.

    Args:
        in_group: Query heads of a group.
        blocks: Of a row.
        info: The kernel's MaskInfo for gradients of keys and values.
    """

    def __init__(self, in_group: int, blocks: int, info: Any) -> None:
        other_TW, kind_TW = (jnp.swapaxes(each[0], 0, 1) for each in (info.data_next, info.block_mask))
        self.in_group, self.blocks, self.width = in_group, blocks, other_TW.shape[1]
        self.lists = other_TW.ravel(), kind_TW.ravel()

    def entry(self, row: Any, column: Any, place: Any) -> Any:
        """In the lists."""
        return (row * self.blocks + column) * self.width + place

    def queries(self, g: Any, row: Any, h: Any, column: Any, place: Any, other: Any, _kind: Any) -> Any:
        return g * self.in_group + h, other[self.entry(row, column, place)], 0

    def lanes_of_queries(self, g: Any, row: Any, h: Any, column: Any, place: Any, other: Any, _kind: Any) -> Any:
        return g * self.in_group + h, 0, other[self.entry(row, column, place)]

    def keys(self, g: Any, row: Any, _h: Any, column: Any, *_: Any) -> Any:
        return g, row * self.blocks + column, 0

    def row_of_queries(self, g: Any, row: Any, h: Any, *_: Any) -> Any:
        return g * self.in_group + h, row, 0

    def row_of_keys(self, g: Any, row: Any, *_: Any) -> Any:
        return g, row, 0


def _block(
    other: Any,
    kind: Any,
    q: Any,
    k: Any,
    v: Any,
    q_segment: Any,
    k_segment: Any,
    logsumexp: Any,
    gradient: Any,
    weighed: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dq_sum: Any,
    dk_sum: Any,
    dv_sum: Any,
    *,
    at: _Places,
    window: int | None,
    softcap: float | None,
    masked: float,
) -> None:
    """One block of keys with one block of queries; products are [keys, queries]."""
    row, h, column, place = (pl.program_id(axis) for axis in range(1, 5))
    block = k.shape[0]
    is_first = (column == 0) & (place == 0)
    is_last = (column == at.blocks - 1) & (place == at.width - 1)

    @pl.when(is_first)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when(is_first & (h == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    entry = at.entry(row, column, place)

    @pl.when(kind[entry] > 0)
    def _() -> None:
        first_query, first_key = (other[entry] - row * at.blocks) * block, column * block
        queries, keys = (pl.ds(pl.multiple_of(first, block), block) for first in (first_query, first_key))
        ahead = jax.lax.broadcasted_iota(jnp.int32, (block, block), 1) + first_query
        ahead -= jax.lax.broadcasted_iota(jnp.int32, (block, block), 0) + first_key
        sees = (pltpu.repeat(k_segment[...], block // LANES, axis=1) == q_segment[:1]) & (ahead >= 0)
        if window is not None:
            sees &= ahead < window

        logits = _dot(k[...], q[...], _LAST_WITH_LAST)
        capped = logits if softcap is None else jnp.tanh(logits / softcap) * softcap
        weights = jnp.exp(jnp.where(sees, capped, masked) - logsumexp[:1])
        dv_sum[keys] += jax.lax.dot(weights.astype(gradient.dtype), gradient[...], preferred_element_type=jnp.float32)
        slopes = (_dot(v[...], gradient[...], _LAST_WITH_LAST) - weighed[:1]) * weights
        if softcap is not None:
            slopes *= 1 - (capped / softcap) ** 2
        slopes = slopes.astype(q.dtype)
        dk_sum[keys] += jax.lax.dot(slopes, q[...], preferred_element_type=jnp.float32)
        dq_sum[queries] += _dot(slopes, k[...], _FIRST_WITH_FIRST)

    @pl.when(is_last)
    def _() -> None:
        dq[...] = dq_sum[...].astype(dq.dtype)

    @pl.when(is_last & (h == at.in_group - 1))
    def _() -> None:
        dk[...] = dk_sum[...].astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


def _dot(first: Any, second: Any, dimensions: Any) -> Any:
    return jax.lax.dot_general(first, second, dimensions, preferred_element_type=jnp.float32)


__all__ = ["gradients_of"]
