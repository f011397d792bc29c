"""Paths of this checkout, XLA flags for quick compilation, and the memory of this process."""

import ctypes
import re
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
EXAMPLES = ROOT / "examples"
QUICK_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Unoptimized machine code: the same programs and collectives, compiled in a sixth of the time, but slower to run."""


def return_freed_memory() -> None:
    """Make malloc return freed memory to the system at once (M_ARENA_MAX, M_MMAP_THRESHOLD), for measurements."""
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(-8, 1) and mallopt(-3, 65536)


def private_bytes() -> int:
    """Return the bytes allocated by this process, without the files it maps."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
