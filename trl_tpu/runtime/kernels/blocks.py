"""The sizes in which the attention kernel computes; also for who counts its work where there is no accelerator."""

LANES = 128
"""A TPU's vectors have as many numbers: lengths and sizes of heads are padded to multiples of it."""
BLOCKS = (512, 384, 256)
"""Queries and keys that are computed at a time, the first that divides the length."""


def padded(size: int) -> int:
    """Return the multiple of `LANES` that ``size`` is padded to."""
    return size + -size % LANES


def padded_head(size: int) -> int:
    """Return the features that heads of ``size`` are padded to: half of a vector's lanes, or whole vectors.

    Arithmetic units are as wide as vectors, and half empty with half of one.
    """
    half = LANES // 2
    return half if size <= half else padded(size)


def block_size(length: int) -> int:
    """Return how many queries, and keys, a block has in rows of ``length``, which are padded."""
    return next((block for block in BLOCKS if padded(length) % block == 0), LANES)


MOST_LIST_BYTES = 2**19
"""Of a TPU's memory for scalars, 1 MiB, for the lists of the blocks that are computed."""


def rows_at_once(length: int) -> int:
    """Return how many rows of ``length`` one call of the kernel takes: it has two lists a block, of whole vectors."""
    blocks = padded(length) // block_size(length)
    return max(1, MOST_LIST_BYTES // (2 * 4 * blocks * padded(blocks)))
