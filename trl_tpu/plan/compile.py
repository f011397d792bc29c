"""A traced program through the TPU's own compiler, on a machine without a TPU.

libtpu compiles ahead of time for a topology that is only named; jax has the way in.
https://docs.jax.dev/en/latest/aot.html
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..runtime import libtpu
from .apart import call_apart
from .trace import TracedProgram


@dataclass(frozen=True)
class CompiledProgram:
    """What the TPU's compiler says of one program. All figures are for one chip, and all sizes in bytes.

    Args:
        arguments: Its arguments.
        results: What it returns, but for what takes the place of a donated argument.
        aliased: What takes such a place.
        temporary: What it needs for what it computes.
        generated_code: Its instructions.
        flops: Operations by XLA's own count, each loop turn by turn, without kernels.
        bytes_moved: See `hlo.bytes_moved`.
        received: See `hlo.received`.
        state: "weight", "optimizer" and "gradient" (buffers to add up in): what stays on the chip between steps.
        idle: What of it this program does not take.
        largest_buffers: See `hlo.largest_buffers`.
    """

    arguments: int
    results: int
    aliased: int
    temporary: int
    generated_code: int
    flops: float
    bytes_moved: float
    compile_seconds: float
    received: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    state: Mapping[str, int] = field(default_factory=dict)
    idle: int = 0
    largest_buffers: tuple[tuple[str, int], ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of a chip's memory at the peak."""
        return self.arguments + self.idle + self.results + self.temporary + self.generated_code


def missing() -> str | None:
    """Why nothing can be compiled for a TPU here, for an error message; None if it can be."""
    for library in ("jax", "libtpu"):
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed; it comes with: pip install 'trl-tpu[tpu]'"
    return None


def compile_for(traced: TracedProgram, topology: str) -> CompiledProgram:
    """What the TPU's compiler makes of ``traced``.

    Args:
        traced: For as many chips as the topology has, or fewer.
        topology: As Google names it: "v6e:4x4", "v5p:2x2x4". A chip is what XLA sees as a device.

    Raises:
        RuntimeError: If libtpu does not know the topology or cannot compile; with what it says.
    """
    if (reason := missing()) is not None:
        raise RuntimeError(f"Compiling for {topology}: {reason}")
    flags = flags_for(topology, os.environ.get(libtpu.VARIABLE, ""))
    return call_apart("compile_child:compile_here", traced, topology, environment={libtpu.VARIABLE: flags})


def flags_for(topology: str, given: str = "") -> str:
    """What libtpu is told in a training on ``topology``, where the user says ``given``."""
    version = int(topology.removeprefix("v")[0])
    return libtpu.with_flags(given, {**libtpu.torch_xla_flags(version), **libtpu.FLAGS})
