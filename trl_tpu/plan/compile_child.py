"""Compiles, in a process of its own: see `compile.compile_for`."""

import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax

from ..errors import UserError
from .compile import CompiledProgram
from .hlo import Visit, bytes_moved, largest_buffers, read_visits, received
from .trace import TracedProgram


def compile_here(traced: TracedProgram, topology: str) -> CompiledProgram:
    """See `compile.compile_for`."""
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
    visits = read_visits(hlo)
    return CompiledProgram(
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=temporary,
        generated_code=memory.generated_code_size_in_bytes,
        flops=_flops(hlo, visits),
        bytes_moved=bytes_moved(visits),
        compile_seconds=seconds,
        received=received(visits, traced.mesh),
        state=traced.state,
        idle=traced.idle,
        largest_buffers=largest_buffers(visits),
    )


def _module(traced: TracedProgram) -> bytes:
    """The program in the form that the client takes, its arguments marked: their layouts, which placeholders cannot
    say, and which are donated, which gets lost on the way."""
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


def _flops(hlo: str, visits: list[Visit]) -> float:
    """Operations by XLA's own count, which takes one turn of each loop: the others are added, turn by turn."""
    client = jax.devices()[0].client

    def counted(module: str) -> float:
        return _jax.hlo_module_cost_analysis(client, _jax.hlo_module_from_text(module))["flops"]

    computations = "HloModule body\n" + hlo.partition("\n")[2].replace("\nENTRY ", "\n")
    return counted(hlo) + sum(
        (visit.times - visit.times // visit.turns)
        * counted(computations.replace(f"\n%{visit.name} (", f"\nENTRY %{visit.name} ("))
        for visit in visits[1:]
        if not visit.is_fused
    )
