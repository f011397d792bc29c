"""Compiles in a process of its own: ``python -m trl_tpu.preflight.compile_child TOPOLOGY TRACED COMPILED [HLO]``."""

import pickle
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax

from ..errors import UserError
from .collectives import collectives_of, largest_buffers
from .counts import flops_of, memory_traffic
from .program import CompiledProgram
from .trace import TracedProgram


def compile_here(traced: TracedProgram, topology: str) -> tuple[CompiledProgram, str]:
    """See `compile.compile_for`; and the compiled HLO as text."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    if traced.chips > len(devices):
        raise UserError(f"The program is for {traced.chips} chips, but {topology} has {len(devices)}.")
    with tempfile.TemporaryDirectory() as dump:
        begin = time.perf_counter()
        executable = devices[0].client.compile(
            _module(traced), _jax.DeviceList(tuple(devices[: traced.chips])), _options(traced.chips, dump)
        )
        seconds = time.perf_counter() - begin
        temporary = _temporary(Path(dump))
    memory = executable.get_compiled_memory_stats()
    hlo = executable.hlo_modules()[0].to_string()
    state = traced.state_per_chip()
    program = CompiledProgram(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=temporary,
        generated_code=memory.generated_code_size_in_bytes,
        flops=flops_of(hlo),
        bytes_accessed=memory_traffic(hlo),
        collectives=collectives_of(hlo),
        compile_seconds=seconds,
        weights=state.get("weight", 0),
        optimizer=state.get("optimizer", 0),
        gradients=state.get("gradient", 0),
        idle=sum(each.bytes_per_chip for each in traced.beside),
        largest_buffers=largest_buffers(hlo),
    )
    return program, hlo


def _module(traced: TracedProgram) -> bytes:
    """The program in the form that the client takes, its arguments marked: their layouts, and which are donated."""
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(traced.hlo))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        main = next(each for each in module.body.operations if each.attributes["sym_name"].value == "main")
        marked = []
        for argument in traced.arguments:
            marks = {"jax.buffer_donor": ir.BoolAttr.get(True)} if argument.donated else {}
            if traced.chips > 1:
                marks["mhlo.sharding"] = ir.StringAttr.get(argument.sharding)
            marked.append(ir.DictAttr.get(marks))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(marked)
        return mlir.module_to_bytecode(module)


def _temporary(dump: Path) -> int:
    """The bytes of HBM that a program needs for what it computes, by the compiler's own list of its allocations.

    ``get_compiled_memory_stats`` says more, 1.8 GB of some 9 for an 8B model: given less than that, libtpu compiles
    the program all the same, and where it refuses, it names what this list has.

    Raises:
        RuntimeError: There is no such list.
    """
    for file in dump.glob("**/*buffer-assignment.txt"):
        # allocations in memories other than HBM have a "color"
        found = re.findall(r"^allocation \d+: size (\d+), preallocated-temp", file.read_text(), re.MULTILINE)
        return sum(int(size) for size in found)
    raise RuntimeError("libtpu compiled the program, but did not write down which memory it takes.")


def _options(chips: int, dump: str) -> Any:
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    for each in (options, build):
        each.num_replicas, each.num_partitions = 1, chips
    build.use_spmd_partitioning = chips > 1
    build.debug_options.xla_dump_to = dump
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(chips).reshape(1, chips))
    if chips > 1:
        # as torch_xla does: else every new weight would come out whole on every chip
        build.allow_spmd_sharding_propagation_to_output = [True]
    return options


def main() -> None:
    topology, asked, answer, *keep = sys.argv[1:]
    program, hlo = compile_here(pickle.loads(Path(asked).read_bytes()), topology)
    Path(answer).write_bytes(pickle.dumps(program))
    for file in keep:
        Path(file).write_text(hlo)


if __name__ == "__main__":
    main()
