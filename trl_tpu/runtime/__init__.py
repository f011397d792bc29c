"""The one seam to the accelerator: everything that differs between PyTorch/XLA, TorchTPU and plain torch goes here.

``choice()`` says which of them was chosen and why; ``current()`` is the chosen `Runtime`. `native` defines the class
and is plain torch; `xla` and `torchtpu` extend it. Beside this room only `plan/placeholder.py` imports torch_xla, and
training imports it only when it is chosen. Importing this module imports nothing else of this package, and torch only
where torch_tpu is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .device_choice import choice

if TYPE_CHECKING:
    from .native import PartitionSpec, Remat, Runtime, Topology, Value

__all__ = ["PartitionSpec", "Remat", "Runtime", "Topology", "Value", "choice", "current", "replace"]

_current: Runtime | None = None


def replace(runtime: Runtime) -> None:
    """Let ``runtime`` be this process's: for tracing programs, before anything trains."""
    global _current
    _current = runtime


def current() -> Runtime:
    """Return the runtime of this process, which the first call makes ready.

    Raises:
        RuntimeError: A device was used before that this runtime cannot share.
    """
    global _current
    if _current is None:  # no `cache`, which torch.compile looks through
        if choice().name == "xla":
            from .xla import XlaRuntime as Chosen
        elif choice().name == "torchtpu":
            from .torchtpu import TorchTpuRuntime as Chosen  # type: ignore[assignment]
        else:
            from .native import Runtime as Chosen  # type: ignore[assignment]
        _current = Chosen()
    return _current


def __getattr__(name: str) -> Any:
    """Import the types when they are first asked for: their module imports torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.native"), name)
