"""A traced program through the TPU's own compiler, on a machine without a TPU.

libtpu compiles ahead of time for a topology that is only named; jax has the way in. It takes programs in MLIR, where
it is written to the arguments how they are laid out, which placeholders cannot say, and which of them are donated,
which gets lost on the way.
https://docs.jax.dev/en/latest/aot.html
"""

import importlib.util
import os
import pickle
import tempfile
from pathlib import Path

from ..runtime import libtpu
from .program import CompiledProgram
from .trace import TracedProgram, run_apart

WITHOUT_A_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""The environment of a process that compiles. jax would otherwise look for a TPU; and several processes may use libtpu
at once, since none has one."""


def missing() -> str | None:
    """Why nothing can be compiled for a TPU here, for an error message; None if it can be."""
    for library in ("jax", "libtpu"):
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed; it comes with: pip install 'trl-tpu[tpu]'"
    return None


def compile_for(traced: TracedProgram, topology: str, *, keep: Path | None = None) -> CompiledProgram:
    """What the TPU's compiler makes of ``traced``.

    Args:
        traced: For as many chips as the topology has, or fewer.
        topology: As Google names it: "v6e:4x4", "v5p:2x2x4". A chip is what XLA sees as a device.
        keep: A file for the compiled HLO.

    Raises:
        RuntimeError: If libtpu does not know the topology or cannot compile; with what it says.
    """
    if (reason := missing()) is not None:
        raise RuntimeError(f"Compiling for {topology}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "traced"), Path(folder, "compiled")
        asked.write_bytes(pickle.dumps(traced))
        environment = {**WITHOUT_A_TPU, libtpu.VARIABLE: flags_for(topology, os.environ.get(libtpu.VARIABLE, ""))}
        arguments = [topology, str(asked), str(answer), *([str(keep)] if keep is not None else [])]
        run_apart("trl_tpu.preflight.compile_child", arguments, environment)
        compiled: CompiledProgram = pickle.loads(answer.read_bytes())
    return compiled


def flags_for(topology: str, given: str = "") -> str:
    """What libtpu is told in a training on ``topology``, where the user says ``given``."""
    version = int(topology.removeprefix("v")[0])
    return libtpu.with_flags(given, {**libtpu.torch_xla_flags(version), **libtpu.FLAGS})


__all__ = ["WITHOUT_A_TPU", "compile_for", "flags_for", "missing"]
