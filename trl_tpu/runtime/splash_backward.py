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

from .blocks import LANES, row_bytes

_SUBLANES = 8
_FOR_BLOCKS = 16 * 2**20
"""For blocks of what comes in, and products of two."""
_FIRST_WITH_FIRST = (((0,), (0,)), ((), ()))
_LAST_WITH_LAST = (((1,), (1,)), ((), ()))


def attend(kernel: Any, q_HTD: Any, k_GTD: Any, v_GTD: Any, segments: Any, rows: int, block: int, window: Any) -> Any:
    """What ``kernel`` (a SplashAttentionKernel that returns logsumexp too) computes, with the backward of this module.

    Args:
        segments: The kernel's SegmentIds.
        rows: How many rows the tokens are of.
        block: Queries, and keys, of a block.
        window: How many tokens a token sees; None for all.
    """

    @jax.custom_vjp
    def run(kernel: Any, segments: Any, q: Any, k: Any, v: Any) -> Any:
        return kernel(q, k, v, segments)[0]

    def forward(kernel: Any, segments: Any, q: Any, k: Any, v: Any) -> Any:
        output, (logsumexp,) = kernel(q, k, v, segments)
        return output, (kernel, segments, q, k, v, output, logsumexp)

    def backward(residuals: Any, gradient: Any) -> Any:
        kernel, segments, q, k, v, output, logsumexp = residuals
        weighed_HT = jnp.einsum("htd,htd->ht", output.astype(jnp.float32), gradient.astype(jnp.float32))
        given = (q, k, v, segments, logsumexp, gradient, weighed_HT)
        return None, None, *_gradients(kernel, *given, rows=rows, block=block, window=window)

    run.defvjp(forward, backward)
    return run(kernel, segments, q_HTD, k_GTD, v_GTD)


def _gradients(
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    logsumexp_HT: Any,
    gradient: Any,
    weighed_HT: Any,
    *,
    rows: int,
    block: int,
    window: int | None,
) -> Any:
    """Of queries, keys and values. ``weighed_HT`` is the product of each output with its gradient."""
    (heads, tokens, keys), (groups, _, values) = q.shape, v.shape
    length, in_group = tokens // rows, heads // groups
    blocks, lists = length // block, kernel.dkv_mask_info
    other_TW, kind_TW = (jnp.swapaxes(each[0], 0, 1) for each in (lists.data_next, lists.block_mask))
    width = other_TW.shape[1]

    def entry(row: Any, column: Any, place: Any) -> Any:
        return (row * blocks + column) * width + place

    def of_queries(g: Any, row: Any, h: Any, column: Any, place: Any, other: Any, _kind: Any) -> Any:
        return g * in_group + h, other[entry(row, column, place)], 0

    def lanes_of_queries(g: Any, row: Any, h: Any, column: Any, place: Any, other: Any, _kind: Any) -> Any:
        return g * in_group + h, 0, other[entry(row, column, place)]

    def of_keys(g: Any, row: Any, _h: Any, column: Any, *_: Any) -> Any:
        return g, row * blocks + column, 0

    def row_of_queries(g: Any, row: Any, h: Any, *_: Any) -> Any:
        return g * in_group + h, row, 0

    def row_of_keys(g: Any, row: Any, *_: Any) -> Any:
        return g, row, 0

    numbers = pl.BlockSpec((None, _SUBLANES, block), lanes_of_queries)
    run = functools.partial(
        _block,
        entry=entry,
        grid=(in_group, blocks, width),
        window=window,
        softcap=kernel.kwargs["attn_logits_soft_cap"],
        masked=kernel.kwargs["mask_value"],
    )
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, rows, in_group, blocks, width),
            in_specs=[
                pl.BlockSpec((None, block, keys), of_queries),
                pl.BlockSpec((None, block, keys), of_keys),
                pl.BlockSpec((None, block, values), of_keys),
                pl.BlockSpec((_SUBLANES, block), lambda *at: lanes_of_queries(*at)[1:]),
                pl.BlockSpec((block, LANES), lambda *at: of_keys(*at)[1:]),
                numbers,
                pl.BlockSpec((None, block, values), of_queries),
                numbers,
            ],
            out_specs=[
                pl.BlockSpec((None, length, keys), row_of_queries),
                pl.BlockSpec((None, length, keys), row_of_keys),
                pl.BlockSpec((None, length, values), row_of_keys),
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
        other_TW.ravel(),
        kind_TW.ravel(),
        q,
        k,
        v,
        jnp.broadcast_to(segments.q, (_SUBLANES, tokens)),
        jnp.broadcast_to(segments.kv[:, None], (tokens, LANES)),
        jnp.broadcast_to(logsumexp_HT[:, None], (heads, _SUBLANES, tokens)),
        gradient,
        jnp.broadcast_to(weighed_HT[:, None], (heads, _SUBLANES, tokens)),
    )


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
    entry: Any,
    grid: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    masked: float,
) -> None:
    """One block of keys with one block of queries; products are [keys, queries]."""
    row, h, column, place = (pl.program_id(axis) for axis in range(1, 5))
    in_group, blocks, width = grid
    block = k.shape[0]
    is_first = (column == 0) & (place == 0)
    is_last = (column == blocks - 1) & (place == width - 1)

    @pl.when(is_first)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when(is_first & (h == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    at = entry(row, column, place)

    @pl.when(kind[at] > 0)
    def _() -> None:
        first_query, first_key = (other[at] - row * blocks) * block, column * block
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

    @pl.when(is_last & (h == in_group - 1))
    def _() -> None:
        dk[...] = dk_sum[...].astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


def _dot(first: Any, second: Any, dimensions: Any) -> Any:
    return jax.lax.dot_general(first, second, dimensions, preferred_element_type=jnp.float32)


__all__ = ["attend"]
