"""Compile a traced program with the TPU's own compiler, on a machine without a TPU, in a process of its own.

libtpu compiles ahead of time for a topology that is only named; jax has the way in.
https://docs.jax.dev/en/latest/aot.html
"""

import importlib.util
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime import libtpu
from .child_process import call_in_child


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch_xla records it, before any compiler.

    Args:
        hlo: A serialized HloModuleProto.
        shardings: How each of its arguments is laid out, in HLO's notation.
        donated: Whether the memory of each goes to a result.
        chips: Devices of its mesh.
    """

    hlo: bytes
    shardings: tuple[str, ...]
    donated: tuple[bool, ...]
    chips: int


@dataclass(frozen=True)
class CompiledProgram:
    """Memory of one program by the TPU's compiler, in bytes of one chip.

    Args:
        arguments: Weights, optimizer state, gradients that accumulate, and the batch.
        results: Everything returned but what takes the place of a donated argument.
        temporary: Intermediate values.
        generated_code: Instructions.
    """

    arguments: int
    results: int
    temporary: int
    generated_code: int

    @property
    def peak(self) -> int:
        """Bytes of a chip's memory at the peak."""
        return self.arguments + self.results + self.temporary + self.generated_code


def missing() -> str | None:
    """Return why nothing can be planned for a TPU here, for an error message; None if it can be."""
    for library in ("torch_xla", "jax", "libtpu"):
        if importlib.util.find_spec(library) is None:
            return f'{library} is not installed. In a checkout, on Linux on x86-64: pip install -e ".[tpu]"'
    return None


def compile_for(traced: TracedProgram, topology: str) -> CompiledProgram:
    """Return what the TPU's compiler makes of ``traced``.

    Args:
        traced: For as many chips as the topology has, or fewer.
        topology: As Google names it: "v6e:4x4", "v5p:2x2x4". A chip is what XLA sees as a device.

    Raises:
        RuntimeError: libtpu does not know the topology or cannot compile; with what it says.
    """
    flags = flags_for(topology, os.environ.get(libtpu.VARIABLE, ""))
    return call_in_child(compile_here, traced, topology, environment={libtpu.VARIABLE: flags})


def flags_for(topology: str, given: str = "") -> str:
    """Return libtpu's flags in a training on ``topology``, the user's ``given`` ones among them."""
    version = int(topology.removeprefix("v")[0])
    return libtpu.with_flags(given, {**libtpu.torch_xla_flags(version), **libtpu.FLAGS})


# ---- in a process that has no other use for libtpu


def compile_here(traced: TracedProgram, topology: str) -> CompiledProgram:
    """Compile in this process; see `compile_for`."""
    from jax.experimental import topologies
    from jaxlib import _jax

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    used = _jax.DeviceList(tuple(devices[: traced.chips]))
    with tempfile.TemporaryDirectory() as dump:
        executable = devices[0].client.compile(_module(traced), used, _options(traced.chips, dump))
        temporary = _temporary(Path(dump))
    memory = executable.get_compiled_memory_stats()
    return CompiledProgram(
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=temporary,
        generated_code=memory.generated_code_size_in_bytes,
    )


def _module(traced: TracedProgram) -> bytes:
    """Return the program in the form that the client takes, with its arguments marked.

    Marks are their layouts, which placeholders cannot have, and which are donated, which gets lost on the way.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jaxlib import _jax

    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(traced.hlo))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        main = next(each for each in module.body.operations if each.attributes["sym_name"].value == "main")
        marked = []
        for sharding, is_donated in zip(traced.shardings, traced.donated, strict=True):
            marks = {"jax.buffer_donor": ir.BoolAttr.get(True)} if is_donated else {}
            if traced.chips > 1:
                marks["mhlo.sharding"] = ir.StringAttr.get(sharding)
            marked.append(ir.DictAttr.get(marks))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(marked)
        return mlir.module_to_bytecode(module)


def _options(chips: int, dump: str) -> Any:
    import numpy as np
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas, options.num_partitions = 1, chips
    build.use_spmd_partitioning = chips > 1
    build.debug_options.xla_dump_to = dump
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(chips).reshape(1, chips))
    # as torch_xla does: else every new weight would come out whole on every chip
    build.allow_spmd_sharding_propagation_to_output = [True]
    return options


def _temporary(dump: Path) -> int:
    """Return the bytes of HBM that a program needs for what it computes, by the compiler's own list of allocations.

    ``get_compiled_memory_stats`` says more, 1.8 GB of some 9 for an 8B model: given less than that, libtpu compiles
    the program all the same, and where it refuses, it names what this list has.
    """
    file = next(dump.glob("**/*buffer-assignment.txt"))
    # allocations in memories other than HBM have a "color"
    found = re.findall(r"^allocation \d+: size (\d+), preallocated-temp", file.read_text(), re.MULTILINE)
    return sum(map(int, found))
