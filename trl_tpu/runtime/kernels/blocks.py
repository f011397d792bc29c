"""The sizes in which the attention kernel computes; also for who counts its work where there is no accelerator."""

LANES = 128
"""A TPU's vectors have as many numbers: lengths and sizes of heads are padded to multiples of it."""
BLOCKS = (512, 384, 256)
"""Queries and keys that are computed at a time, the first that divides the length."""


def padded(size: int) -> int:
    """The multiple of `LANES` that ``size`` is padded to."""
    return size + -size % LANES


def padded_head(size: int) -> int:
    """What the kernel takes heads of ``size`` features for: half of a vector's lanes, or whole ones.

    Arithmetic units are as wide as vectors, and half empty with half of one.
    """
    half = LANES // 2
    return half if size <= half else padded(size)


def block_size(length: int) -> int:
    """Queries, and keys, of a block in rows of ``length``, which are padded."""
    return next((block for block in BLOCKS if padded(length) % block == 0), LANES)


MOST_ROW_BYTES = 40 * 2**20
"""Of a TPU's own memory, for the gradients of a row."""


def row_bytes(length: int, head_dims: tuple[int, int], itemsize: int) -> int:
    """What gradients of queries, keys and values take of one head of a row: sums in float32, and two results of each.

    Args:
        head_dims: Features of a query with a key, and with a value.
        itemsize: Bytes of a number of the results.
    """
    keys, values = map(padded, head_dims)
    return padded(length) * (2 * keys + values) * (4 + 2 * itemsize)


def has_fused_backward(length: int, head_dims: tuple[int, int], itemsize: int) -> bool:
    """Whether the backward is one kernel, which keeps a row's gradients on the chip; else it is two."""
    return row_bytes(length, head_dims, itemsize) <= MOST_ROW_BYTES


MOST_LIST_BYTES = 2**19
"""Of a TPU's memory for scalars, 1 MiB, for the lists of the blocks that are computed."""


def rows_at_once(length: int) -> int:
    """How many rows of ``length`` one call of the kernel takes: of each block it has two lists, of whole vectors."""
    blocks = padded(length) // block_size(length)
    return max(1, MOST_LIST_BYTES // (2 * 4 * blocks * padded(blocks)))
