"""Compile a traced program with the TPU compiler on a machine without a TPU.

libtpu can compile ahead of time for a named topology: https://docs.jax.dev/en/latest/aot.html.
Tracing and compiling run in child processes, because torch_xla sets the device of a process only once, and libtpu may
abort a process while it compiles. Importing this module does not import torch.
"""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..parallel.mesh import parse_topology
from ..runtime import device_choice

#: Environment of the child processes: jax uses the CPU, libtpu does not query Google Cloud's metadata server, and
#: several processes may load libtpu at once.
WITHOUT_A_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class ChildError(UserError, RuntimeError):
    """The trainer or the TPU's compiler has failed in a child process."""


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch_xla records it, before compilation.

    Args:
        hlo: The program as a serialized HloModuleProto.
        shardings: Sharding of each argument in HLO notation.
        donated: For each argument, whether a result reuses its memory.
        chips: Number of devices in the mesh.
        idle: Bytes per chip of tensors that stay in memory although the program does not read them, such as the
            optimizer state during gradient accumulation.
    """

    hlo: bytes
    shardings: tuple[str, ...]
    donated: tuple[bool, ...]
    chips: int
    idle: int = 0


@dataclass(frozen=True)
class CompiledProgram:
    """Memory and work of one program, in the TPU compiler's figures. All figures are per chip.

    Args:
        arguments: Bytes of weights, optimizer state, accumulated gradients and the batch. Idle tensors are included.
        results: Bytes of results that do not overwrite an argument.
        temporary: Bytes of intermediate values.
        generated_code: Bytes of instructions; 0 (unknown) if no code was generated.
        flops: Arithmetic operations; those in custom kernels are not counted. 0 (unknown) for a program with loops,
            because the compiler counts a loop body only once.
        received: Lower bound on the bytes that collectives receive from other chips; 0 (unknown) for a program with
            loops.
        moved: Lower bound on the bytes read from HBM and written to it; 0 (unknown) for a program with loops.
    """

    arguments: int
    results: int
    temporary: int
    generated_code: int
    flops: float = 0.0
    received: float = 0.0
    moved: float = 0.0

    @property
    def peak(self) -> int:
        """Peak memory of a chip in bytes."""
        return self.arguments + self.results + self.temporary + self.generated_code


def check_libraries() -> None:
    """Raise UserError if a library required for compiling is not installed: tracing takes minutes."""
    for library in ("torch_xla", "jax", "libtpu"):
        if importlib.util.find_spec(library) is None:
            raise UserError(f'{library} is not installed. In a checkout, on Linux on x86-64: pip install -e ".[tpu]"')


def pretend_devices(values: Mapping[str, Any], words: list[str]) -> None:
    """Give torch_xla one virtual device per chip of the slice, because checks of the training settings count devices.

    The devices compute nothing. Call this before torch_xla is imported: the import fixes the number of devices.

    Args:
        values: Values of the command's YAML file.
        words: Words of the command line.

    Raises:
        UserError: The topology is unknown.
    """
    topologies = re.findall(r"--topology[= ](\S+)", " ".join(words)) or [values.get("topology")]
    chips = parse_topology(topologies[-1]).chips if topologies[-1] else 1  # the parser rejects a missing topology
    os.environ |= virtual_devices(chips)


def virtual_devices(count: int) -> dict[str, str]:
    """Return the environment in which torch_xla has ``count`` virtual devices on the CPU."""
    return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count), "USE_TORCH_XLA": "1"}


def compile_for(traced: TracedProgram, topology: str, whole: bool = True) -> CompiledProgram:
    """Compile ``traced`` for a TPU slice.

    Args:
        traced: The program. Its mesh must not have more devices than the topology has chips.
        topology: Google's name of the slice, such as "v6e:4x4" or "v5p:2x2x4".
        whole: Whether to generate code, which takes most of the time. Only `generated_code` needs it.

    Raises:
        ChildError: libtpu does not know the topology or cannot compile the program. The message is libtpu's.
    """
    flags = device_choice.flags_for(topology, os.environ.get(device_choice.VARIABLE, ""))
    return call_in_child(compile_here, traced, topology, whole, environment={device_choice.VARIABLE: flags})


# ---- child processes


def call_in_child(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str]) -> Any:
    """Call ``function`` in a new process and return its result.

    Args:
        function: A module-level function. The function, its arguments and its result are pickled.
        arguments: The function's arguments.
        environment: Environment variables to add for the new process.

    Raises:
        ChildError: The function raised an exception (its type and text are in the message), or the process crashed,
            for example for lack of host memory.
    """
    # the child must be able to import the modules of pickled classes, such as a model's custom code
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **WITHOUT_A_TPU, **environment}
    with tempfile.NamedTemporaryFile() as file:
        exchange = Path(file.name)
        exchange.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-c", f"from {__name__} import run_pickled_call; run_pickled_call()", file.name]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise ChildError(f"Subprocess ended with status {process.returncode}: {process.stderr.strip()[-4000:]}")
        result, message = pickle.loads(exchange.read_bytes())
    if message:
        raise ChildError(message)
    return result


def run_pickled_call() -> None:
    """Read a pickled call from the file named on the command line, run it, and write the result to the same file."""
    exchange = Path(sys.argv[1])
    function, arguments = pickle.loads(exchange.read_bytes())
    try:
        result, message = function(*arguments), ""
    except Exception as error:  # compiler messages are long; the beginning matters
        result, message = None, f"{type(error).__name__}: {error}"[:4000]
    exchange.write_bytes(pickle.dumps((result, message)))
    os._exit(0)  # without waiting for the compiler's threads


# ---- in the child process that compiles


def compile_here(traced: TracedProgram, topology: str, whole: bool) -> CompiledProgram:
    """Compile in this process; see `compile_for`."""
    import jax
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jaxlib import _jax

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    used = _jax.DeviceList(tuple(devices[: traced.chips]))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options, dump = _compile_options(traced.chips, folder), Path(folder)
        compiling = ThreadPoolExecutor(1).submit(devices[0].client.compile, _mlir_module(traced), used, options)
        # libtpu writes this file when the program is final and its memory is assigned, before it generates code
        while not compiling.done() and (whole or not any(dump.glob("*_after_buffer_assignment.txt"))):
            time.sleep(0.1)
        code = compiling.result().get_compiled_memory_stats().generated_code_size_in_bytes if compiling.done() else 0
        listing = next(dump.glob("*after_optimizations.txt")).read_text()
        allocations = _ALLOCATION.findall(next(dump.glob("*buffer-assignment.txt")).read_text())
    bytes_of, has_loops = Counter[str](), " while(" in listing
    for size, kind, overwritten in allocations:
        bytes_of[kind] += int(size)
        bytes_of["overwritten"] += int(size) if overwritten else 0
    module, cpu = xla_client._xla.hlo_module_from_text(listing), jax.devices("cpu")[0].client
    return CompiledProgram(
        arguments=bytes_of["parameter"] + traced.idle,
        results=bytes_of["maybe-live-out"] + bytes_of["output"],
        temporary=bytes_of["preallocated-temp"],
        generated_code=code,
        flops=0.0 if has_loops else xla_client._xla.hlo_module_cost_analysis(cpu, module)["flops"],
        received=0.0 if has_loops else received(listing),
        moved=0.0 if has_loops else bytes_of["parameter"] + moved(listing) - bytes_of["overwritten"],
    )


def _mlir_module(traced: TracedProgram) -> bytes:
    """Convert the program to MLIR bytecode, and mark its arguments with their shardings and donations.

    Both must be added here: placeholders cannot have a sharding, and the conversion drops donations.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jaxlib import _jax

    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(traced.hlo))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        main = next(item for item in module.body.operations if item.attributes["sym_name"].value == "main")
        argument_attributes = []
        for sharding, is_donated in zip(traced.shardings, traced.donated, strict=True):
            attributes = {"jax.buffer_donor": ir.BoolAttr.get(True)} if is_donated else {}
            if traced.chips > 1:
                attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
            argument_attributes.append(ir.DictAttr.get(attributes))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(argument_attributes)
        return mlir.module_to_bytecode(module)


def _compile_options(chips: int, dump: str) -> Any:
    import numpy as np
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas, options.num_partitions = 1, chips
    build.use_spmd_partitioning = chips > 1
    build.debug_options.xla_dump_to = dump
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(chips).reshape(1, chips))
    # torch_xla sets this, too; without it, results such as updated weights would be replicated
    build.allow_spmd_sharding_propagation_to_output = [True]
    return options


# bytes, kind, and whether a result overwrites an argument; allocations in memories besides HBM have a "color" instead
_ALLOCATION = re.compile(
    r"^allocation \d+: size (\d+), (parameter|preallocated-temp|maybe-live-out|output)\b.*?(maybe-live-out)?:?$",
    re.MULTILINE,
)
# result shapes of instructions that write new values
_WRITTEN = re.compile(
    r"^  (?!ROOT)\S+ = (.*?) (?!(?:parameter|get-tuple-element|bitcast|tuple|\S+-start)\()[\w-]+\(", re.MULTILINE
)
# arrays such as bf16[8,128]{1,0:T(8,128)S(1)}: bits per number, dimensions, and layout; S(...) is a memory besides HBM
_ARRAY = re.compile(r"\w+?(\d+)\[([\d,]*)\](\{[^}]*\})?")
# groups: result shapes, operation, "-start", channel, and either the first group's chips or the size of the groups
_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(.*?channel_id=(\d+)"
    r"(?:.*?replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]))?"
)


def moved(listing: str) -> float:
    """Return a lower bound on the bytes that a compiled program writes to HBM and reads back, without its arguments.

    Each result of an instruction is written, and read by another instruction, at least once.

    Args:
        listing: The program in HLO notation.
    """
    shapes = _WRITTEN.findall(listing[listing.index("\nENTRY ") :])
    return 2 * sum(_size(*array) for shape in shapes for array in _ARRAY.findall(shape) if "S(" not in array[2])


def _size(bits: str, dimensions: str, _: str = "") -> float:
    return int(bits) / 8 * prod(int(length) for length in dimensions.split(",") if length)


def received(listing: str) -> float:
    """Return a lower bound on the bytes that a chip receives in the collectives of a compiled program.

    A chip's own share of a result is not counted. An all-reduce is counted as a reduce-scatter, half of its traffic,
    because the compiler may write a reduce-scatter as an all-reduce followed by a slice.

    Args:
        listing: The program in HLO notation. Operations with the same `channel_id` are parts of one collective, and
            only one of them counts.
    """
    bytes_of: dict[str, float] = {}
    for shapes, operation, start, channel, members, group_size in _COLLECTIVE.findall(listing):
        chips = int(group_size) if group_size else members.count(",") + 1 if members else 0  # 0 without groups
        sizes = [_size(*array) for array in _ARRAY.findall(shapes)]
        full = max(sizes) if start else sum(sizes)  # the result of a "-start" operation includes its operand
        if operation == "reduce-scatter":
            full *= chips
        bytes_of[channel] = full * (1 - 1 / chips if chips else 1)
    return sum(bytes_of.values())
