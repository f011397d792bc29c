"""How memory that is freed leaves a process, for tests that measure it."""

import ctypes


def give_back_at_once() -> None:
    """Have freed memory go back to the system, so that it is not counted: M_ARENA_MAX and M_MMAP_THRESHOLD."""
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(-8, 1) and mallopt(-3, 65536)
