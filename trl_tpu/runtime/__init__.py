"""Device abstraction: all differences between PyTorch/XLA, TorchTPU and plain torch are in this package.

``choice()`` returns the chosen backend and the reason; ``current()`` returns its `Runtime`. `native` defines the class
for plain torch; `xla` and `torchtpu` extend it. Outside this package only `plan/placeholder.py` imports torch_xla, and
training imports torch_xla only if it is chosen. Importing this module imports only `device_choice`; it imports torch
only if torch_tpu is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .device_choice import choice

if TYPE_CHECKING:
    from .native import PartitionSpec, Remat, Runtime, Topology, Value, flush_denormals

__all__ = ["PartitionSpec", "Remat", "Runtime", "Topology", "Value", "choice", "current", "flush_denormals", "replace"]

_CLASSES = {"xla": "XlaRuntime", "torchtpu": "TorchTpuRuntime", "native": "Runtime"}
_current: Runtime | None = None


def replace(runtime: Runtime) -> None:
    """Make ``runtime`` this process's runtime, to trace programs. Call it before training starts."""
    global _current
    _current = runtime


def current() -> Runtime:
    """Return the runtime of this process. The first call initializes it.

    Raises:
        RuntimeError: A device was already in use, and this runtime cannot be initialized after that.
    """
    global _current
    if _current is None:  # not `functools.cache`: torch.compile traces through it and would run the function again
        name = choice().name
        _current = getattr(import_module(f"{__name__}.{name}"), _CLASSES[name])()
    return _current


def __getattr__(name: str) -> Any:
    """Import names of `native` at their first use, since it imports torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.native"), name)
