"""Which blocks of queries and keys splash attention computes, decided on the device, batch by batch.

jax's kernel takes for each block of queries a list of blocks of keys, written down when it is made: for causal
attention all up to the diagonal. In rows of several dialogues most of those blocks see nothing of each other, and a
prefix that two dialogues share is in two rows, of which one need not ask. The lists are arguments of the kernel, so
they are made here from the segments. The rows of a batch are put end to end, each with the lists of its own blocks,
since no row's lists are another's. Only imported where jax is.

Letters: B rows, L length, N blocks of a row, W places in a block's list.
"""

from typing import Any

import jax
import jax.numpy as jnp


def meeting_blocks(segment_BL: jax.Array, needed_BL: jax.Array, block: int) -> jax.Array:
    """Return whether the needed queries of one block and the keys of another have a segment in common, [B, N, N].

    By the least and the largest segment of each block: where segments are in order, that is exact.
    """
    segment_BNb, needed_BNb = (each.reshape(len(each), -1, block) for each in (segment_BL, needed_BL))
    ends = jnp.iinfo(segment_BL.dtype)
    first_BN = jnp.where(needed_BNb, segment_BNb, ends.max).min(2)
    last_BN = jnp.where(needed_BNb, segment_BNb, ends.min).max(2)
    least_BN, most_BN = segment_BNb.min(2), segment_BNb.max(2)
    return (first_BN[:, :, None] <= most_BN[:, None]) & (least_BN[:, None] <= last_BN[:, :, None])


def with_blocks(kernel: Any, meets_BNN: jax.Array) -> Any:
    """Return ``kernel`` (a SplashAttentionKernel of one row) for rows end to end, which runs the blocks that meet.

    A block of queries that meets none gives no numbers.

    Args:
        meets_BNN: From `meeting_blocks`: for each row, queries by keys.
    """
    return type(kernel)(
        _of_rows(kernel.fwd_mask_info, meets_BNN),
        _of_rows(kernel.dq_mask_info, meets_BNN),
        _turned(_of_rows(_turned(kernel.dkv_mask_info), jnp.swapaxes(meets_BNN, 1, 2))),
        **kernel.kwargs,
    )


def _turned(lists: Any) -> Any:
    """Transpose lists: for gradients of keys and values they are of blocks of queries, and stand in columns."""
    names = [name for name in ("data_next", "block_mask", "mask_next") if getattr(lists, name) is not None]
    return lists._replace(**{name: jnp.swapaxes(getattr(lists, name), 1, 2) for name in names})


def _of_rows(lists: Any, meets_BNN: jax.Array) -> Any:
    rows, blocks, _ = meets_BNN.shape
    other_NW, kind_NW = (each[0].astype(jnp.int32) for each in (lists.data_next, lists.block_mask))
    shape = (rows, *other_NW.shape)
    is_run_BNW = (kind_NW > 0) & jnp.take_along_axis(meets_BNN, jnp.broadcast_to(other_NW, shape), axis=2)
    other_BNW = other_NW + blocks * jnp.arange(rows, dtype=jnp.int32)[:, None, None]
    is_run, other = (each.reshape(rows * blocks, -1) for each in (is_run_BNW, other_BNW))
    kind = jnp.where(is_run, jnp.tile(kind_NW, (rows, 1)), 0)
    masks, sequence = lists.mask_next, lists.q_sequence
    return lists._replace(
        # where nothing is run, the block is named that is run next, which so is fetched in time
        data_next=_upcoming(other, is_run)[None],
        block_mask=kind[None],
        mask_next=None if masks is None else jnp.tile(masks, (1, rows, 1)),
        q_sequence=None if sequence is None else jnp.arange(rows * len(sequence), dtype=sequence.dtype),
    )


def _upcoming(other_NW: jax.Array, is_run_NW: jax.Array) -> jax.Array:
    """Return at each place what the next place that is run names, list after list and after the last the first."""
    is_run = is_run_NW.ravel()
    places = jnp.arange(is_run.size)
    following = jax.lax.cummin(jnp.where(is_run, places, is_run.size), reverse=True)
    following = jnp.where(following == is_run.size, jnp.argmax(is_run), following)
    return other_NW.ravel()[following].reshape(other_NW.shape)


__all__ = ["meeting_blocks", "with_blocks"]
