"""Compile a traced program with the TPU's own compiler, on a machine without a TPU.

libtpu compiles ahead of time for a topology that is only named: https://docs.jax.dev/en/latest/aot.html.
Tracing and compiling run in child processes: torch_xla fixes the device of a process once, and libtpu may abort the
process in which it compiles. Importing this module imports no torch.
"""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..parallel.mesh import parse_topology
from ..runtime import device_choice as libtpu

WITHOUT_A_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""Environment of the child processes: jax must not look for a TPU, and several processes may use libtpu at once."""


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch_xla records it, before any compiler.

    Args:
        hlo: A serialized HloModuleProto.
        shardings: The layout of each argument, in HLO's notation.
        donated: Whether the memory of each argument is reused for a result.
        chips: Devices of its mesh.
        idle: Bytes on one chip that stay in memory and that the program does not read, such as the optimizer state
            while gradients accumulate.
    """

    hlo: bytes
    shardings: tuple[str, ...]
    donated: tuple[bool, ...]
    chips: int
    idle: int = 0


@dataclass(frozen=True)
class CompiledProgram:
    """Memory and work of one program on one chip, as the TPU's compiler counts them.

    Args:
        arguments: Bytes of weights, optimizer state, accumulated gradients and the batch.
        results: Bytes of everything returned that does not overwrite an argument.
        temporary: Bytes of intermediate values.
        generated_code: Bytes of instructions.
        flops: Operations, without those of kernels. 0 for a program with loops: the compiler counts a loop once.
        received: Bytes that collectives receive from other chips; 0 for a program with loops.
    """

    arguments: int
    results: int
    temporary: int
    generated_code: int
    flops: float = 0.0
    received: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes of a chip's memory at the peak."""
        return self.arguments + self.results + self.temporary + self.generated_code


def missing() -> str | None:
    """Return an error message if a library that compiling needs is not installed, or None."""
    for library in ("torch_xla", "jax", "libtpu"):
        if importlib.util.find_spec(library) is None:
            return f'{library} is not installed. In a checkout, on Linux on x86-64: pip install -e ".[tpu]"'
    return None


def pretend_devices(values: Mapping[str, Any], words: list[str]) -> None:
    """Give torch_xla as many virtual devices as the slice has chips, so that the training's own checks count them.

    They compute nothing. Call it before torch_xla is imported, which fixes their number.

    Args:
        values: The command's YAML file.
        words: Its command line.

    Raises:
        UserError: There is no such slice.
    """
    named = re.findall(r"--topology[= ](\S+)", " ".join(words)) or [values.get("topology")]
    chips = parse_topology(named[-1]).chips if named[-1] else 1  # the parser rejects a missing topology
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "USE_TORCH_XLA": "1"}


def compile_for(traced: TracedProgram, topology: str) -> CompiledProgram:
    """Compile ``traced`` for a TPU slice.

    Args:
        traced: For at most as many chips as the topology has.
        topology: Google's name: "v6e:4x4", "v5p:2x2x4".

    Raises:
        RuntimeError: libtpu does not know the topology or cannot compile; with libtpu's message.
    """
    flags = libtpu.flags_for(topology, os.environ.get(libtpu.VARIABLE, ""))
    return call_in_child(compile_here, traced, topology, environment={libtpu.VARIABLE: flags})


# ---- child processes


def call_in_child(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str]) -> Any:
    """Return the result of ``function``, called in a new process.

    Args:
        function: A module's function. It, its arguments and its result are pickled.
        arguments: Its arguments.
        environment: Variables of that process, added to those of this one.

    Raises:
        RuntimeError: The function raised, with its message; or the process ended early, because of a fault in a
            library or too little host memory.
    """
    # a model's own classes are pickled by name: the child must find their modules too
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **WITHOUT_A_TPU, **environment}
    with tempfile.NamedTemporaryFile() as file:
        exchange = Path(file.name)
        exchange.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-c", f"from {__name__} import answer; answer()", file.name]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"It ended with status {process.returncode}: {process.stderr.strip()[-4000:]}")
        result, message = pickle.loads(exchange.read_bytes())
    if message:
        raise RuntimeError(message)
    return result


def answer() -> None:
    """Call the function that the file named on the command line holds, and replace the file with its result."""
    exchange = Path(sys.argv[1])
    function, arguments = pickle.loads(exchange.read_bytes())
    try:
        result, message = function(*arguments), ""
    except Exception as error:  # compiler messages are long and begin with what matters
        result, message = None, f"{type(error).__name__}: {error}"[:4000]
    exchange.write_bytes(pickle.dumps((result, message)))


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
    memory, listing = executable.get_compiled_memory_stats(), executable.hlo_modules()[0].to_string()
    has_loops = " while(" in listing
    return CompiledProgram(
        arguments=memory.argument_size_in_bytes + traced.idle,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=temporary,
        generated_code=memory.generated_code_size_in_bytes,
        flops=0.0 if has_loops else executable.cost_analysis()["flops"],
        received=0.0 if has_loops else received(listing),
    )


def _module(traced: TracedProgram) -> bytes:
    """Return the program in the form that the client takes, with its arguments marked.

    Marks are the layouts, which placeholders cannot have, and the donated arguments, which the conversion loses.
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
    # as torch_xla does; otherwise every new weight would come out unsharded
    build.allow_spmd_sharding_propagation_to_output = [True]
    return options


def _temporary(dump: Path) -> int:
    """Return the bytes of HBM for intermediate values, from the compiler's own list of allocations.

    ``get_compiled_memory_stats`` reports more: 1.8 GB more of some 9 GB for an 8B model. libtpu compiles the same
    program with less memory than that, and its out-of-memory message names the size of this list.
    """
    file = next(dump.glob("**/*buffer-assignment.txt"))
    # allocations in memories other than HBM have a "color"
    found = re.findall(r"^allocation \d+: size (\d+), preallocated-temp", file.read_text(), re.MULTILINE)
    return sum(map(int, found))


_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(.*?channel_id=(\d+)"
    r"(?:.*?replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]))?"
)


def received(listing: str) -> float:
    """Return the bytes that collectives of a compiled program bring to a chip, at least.

    A chip has its own share of a result already. An all-reduce counts once: the compiler writes a reduce-scatter as an
    all-reduce of which only a slice is used.

    Args:
        listing: The program in HLO's notation. Parts of one collective have the same `channel_id`.
    """
    found: dict[str, float] = {}
    for shapes, name, starts, channel, members, size in _COLLECTIVE.findall(listing):
        chips = int(size) if size else members.count(",") + 1 if members else 0
        # arrays such as bf16[8,128]: bits of a number, and sizes
        arrays = re.findall(r"\w+?(\d+)\[([\d,]*)\]", shapes)
        sizes = [int(bits) / 8 * prod(int(size) for size in shape.split(",") if size) for bits, shape in arrays]
        whole = max(sizes) if starts else sum(sizes)  # the result of a start repeats its operand
        if name == "reduce-scatter":
            whole *= chips
        found[channel] = whole * (1 - 1 / chips if chips else 1)
    return sum(found.values())
