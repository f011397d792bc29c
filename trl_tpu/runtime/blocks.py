"""The sizes in which the attention kernel computes; also for who counts its work where there is no accelerator."""

LANES = 128
"""A TPU's vectors have as many numbers: lengths and sizes of heads are padded to multiples of it."""
BLOCKS = (512, 384, 256)
"""Queries and keys that are computed at a time, the first that divides the length."""


def padded(size: int) -> int:
    """The multiple of `LANES` that ``size`` is padded to."""
    return size + -size % LANES


def block_size(length: int) -> int:
    """Queries, and keys, of a block in rows of ``length``, which are padded."""
    return next((block for block in BLOCKS if padded(length) % block == 0), LANES)
