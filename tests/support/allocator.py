"""What memory a process has, and how what is freed leaves it, for tests that measure it."""

import ctypes
import re
from pathlib import Path


def give_back_at_once() -> None:
    """Have freed memory go back to the system, so that it is not counted: M_ARENA_MAX and M_MMAP_THRESHOLD."""
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(-8, 1) and mallopt(-3, 65536)


def private_bytes() -> int:
    """What this process has allocated; files that it maps are not in it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
