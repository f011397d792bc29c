"""The one seam to the accelerator: everything that differs between PyTorch/XLA and plain torch goes through here.

``choice()`` says which of them was chosen and why; ``current()`` is the chosen `Runtime`, which `native` defines as
plain torch is one, and `xla` extends. Only this package imports torch_xla, and only when it is chosen. Importing it
imports no torch, nor anything else of this package.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .base import PartitionSpec, Planners, Remat, Topology, Value
from .device_choice import choice

if TYPE_CHECKING:
    from .native import Runtime

__all__ = ["PartitionSpec", "Planners", "Remat", "Runtime", "Topology", "Value", "choice", "current", "replace"]

_replacement: Runtime | None = None


def replace(runtime: Runtime) -> None:
    """Let ``runtime`` be this process's: for tracing programs, before anything trains."""
    global _replacement
    _replacement = runtime
    current.cache_clear()


@cache
def current() -> Runtime:
    """Return the runtime of this process, which the first call makes ready.

    Raises:
        RuntimeError: A device was used before that this runtime cannot share.
    """
    if _replacement is not None:
        return _replacement
    if choice().name == "xla":
        from .xla import XlaRuntime

        return XlaRuntime()
    from .native import Runtime

    return Runtime()


def __getattr__(name: str) -> Any:
    if name != "Runtime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .native import Runtime  # imports torch

    return Runtime
