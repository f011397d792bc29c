"""The sizes in which the attention kernel computes; also for who counts its work where there is no accelerator."""

LANES = 128
"""A TPU's vectors have as many numbers: lengths and sizes of heads are padded to multiples of it."""
BLOCK = 512
"""Queries and keys that are computed at a time, as in torch_xla's and MaxText's defaults; fewer in shorter rows."""


def padded(size: int) -> int:
    """Return the multiple of `LANES` that ``size`` is padded to."""
    return size + -size % LANES


def padded_head(size: int) -> int:
    """Return the features that heads of ``size`` are padded to: half of a vector's lanes, or whole vectors."""
    return LANES // 2 if size <= LANES // 2 else padded(size)
