"""The step that the trainer runs, as a program for a mesh of any size, without weights, data or devices.

The trainer itself is run, with placeholders in the place of weights and batches: see `trl_tpu.runtime.placeholder`.
Each trace has a process of its own, since torch_xla fixes once what a process computes on.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PretrainedConfig

from ..parallel.mesh import names_of
from ..runtime import PartitionSpec

STATE = ("weight", "optimizer", "gradient")
"""Kinds of arguments that stay on the chips from step to step."""


@dataclass(frozen=True)
class Rows:
    """The shape of every batch: of all devices together.

    Args:
        pairs: In a micro-batch; a whole number for each part of the batch.
        length: Columns of each row.
        rows: Packed rows, over which the pairs are dealt out evenly; padded batches have two for each pair.
    """

    pairs: int
    length: int
    rows: int | None = None


@dataclass(frozen=True)
class StepRequest:
    """What to trace.

    Args:
        model: A model's config; no weights are read.
        chips: In the mesh.
        batch: The shape of a batch.
        arguments: Of `RewardConfig`. Its batch size has to be that of ``batch``.
        peft: A `peft.LoraConfig`; None trains the whole model.
        what: A training step or an evaluation step.
        dtype: The weights', as torch names it.
    """

    model: PretrainedConfig
    chips: int
    batch: Rows
    arguments: Mapping[str, Any] = field(default_factory=dict)
    peft: Any = None
    what: Literal["train", "evaluate"] = "train"
    dtype: str = "float32"


@dataclass(frozen=True)
class Argument:
    """One argument of a traced program.

    Args:
        name: Of the parameter it is or belongs to, or of the batch's entry.
        kind: "weight", "optimizer", "gradient" (a buffer to accumulate in), "batch" or "other".
        shape: Over all chips.
        dtype: As torch names it: "float32".
        bytes: Over all chips.
        parts: In how many parts the mesh cuts it; each chip has one.
        sharding: Its layout, in HLO's words.
        donated: Whether its memory goes to a result.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    parts: int
    sharding: str
    donated: bool

    @property
    def bytes_per_chip(self) -> int:
        return self.bytes // self.parts


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch_xla records it, before any compiler.

    Args:
        hlo: A serialised HloModuleProto.
        arguments: Its arguments, in order.
        chips: For how many it is.
        mesh: The sizes of the mesh's axes.
        beside: State that is on the chips too, since other programs of the step take it.
    """

    hlo: bytes
    arguments: tuple[Argument, ...]
    chips: int
    mesh: Mapping[str, int]
    beside: tuple[Argument, ...] = ()

    def bytes_per_chip(self) -> dict[str, int]:
        """Bytes of all arguments on one chip, by kind."""
        return _bytes_by_kind(self.arguments)

    def state_per_chip(self) -> dict[str, int]:
        """Bytes on one chip of what stays there from step to step, by kind: "weight", "optimizer", "gradient"."""
        return _bytes_by_kind(each for each in (*self.arguments, *self.beside) if each.kind in STATE)


def _bytes_by_kind(arguments: Iterable[Argument]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for argument in arguments:
        sums[argument.kind] = sums.get(argument.kind, 0) + argument.bytes_per_chip
    return sums


def trace_programs(request: StepRequest) -> tuple[TracedProgram, ...]:
    """The programs of a step, each once, in order: one, or with `gradient_accumulation_steps` a micro-batch's and then
    the update's. State that one of them does not read is on the chips all the same.

    Raises:
        RuntimeError: If the trainer refuses the request; with what it says.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "request"), Path(folder, "programs")
        asked.write_bytes(pickle.dumps(request))
        environment = {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(min(request.chips, 2)),  # where there is one, nothing is sharded
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "USE_TORCH_XLA": "1",
            "HF_HUB_OFFLINE": "1",
        }
        run_apart("trl_tpu.preflight.trace_child", [str(asked), str(answer)], environment)
        programs: tuple[TracedProgram, ...] = pickle.loads(answer.read_bytes())
    return programs


def trace_step(request: StepRequest) -> TracedProgram:
    """Of `trace_programs`, the one that goes over a batch."""
    return pass_of(trace_programs(request))


def pass_of(programs: Sequence[TracedProgram]) -> TracedProgram:
    """Of a step's programs the one that takes a batch, beside it the state that only the others take."""
    over_batch = max(programs, key=lambda program: ("batch" in program.bytes_per_chip(), len(program.hlo)))
    state = {each.name: each for program in programs for each in program.arguments if each.kind in STATE}
    taken = {each.name for each in over_batch.arguments}
    return replace(over_batch, beside=tuple(each for name, each in state.items() if name not in taken))


class Crashed(RuntimeError):
    """A process ended without a word of its own: a fault in a library, or killed for the machine's memory."""


def run_apart(module: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    """Run a module of this package as a process of its own.

    Raises:
        Crashed: If a signal ended it.
        RuntimeError: If it fails; with what it said.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(each for each in (root, os.environ.get("PYTHONPATH", "")) if each)
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | dict(environment) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if process.returncode < 0:
        printed = process.stderr.strip()[-4000:]
        raise Crashed(f"{module} crashed: {signal.strsignal(-process.returncode)}. It printed last:\n{printed}")
    if process.returncode:
        raise RuntimeError(_what_it_said(process.stderr) or f"{module} ended with {process.returncode}.")


def _what_it_said(printed: str) -> str:
    """The exception that ended a process, from what it printed; compilers' are long, and begin with what matters."""
    trace = printed.rpartition("Traceback (most recent call last):")[2]
    said = re.search(r"^[\w.]+(?:: .*|$)", trace, re.MULTILINE)
    return trace[said.start() :].strip()[:4000] if said else printed.strip()[-4000:]


def parts_of(mesh: Mapping[str, int], axes: PartitionSpec) -> int:
    """Into how many parts ``axes``, of each dimension, cut a tensor."""
    return prod(mesh[axis] for over in axes for axis in names_of(over))


def hlo_sharding(mesh: Mapping[str, int], axes: PartitionSpec) -> str:
    """A layout over a mesh, whose devices are numbered with the last axis fastest, in HLO's words."""
    names = list(mesh)
    over = [[axis for axis in names_of(each) if mesh[axis] > 1] for each in axes]
    used = [axis for dimension in over for axis in dimension]
    if not used:
        return "{replicated}"
    rest = [axis for axis in names if axis not in used]
    copies = prod(mesh[axis] for axis in rest)
    tiles = [prod(mesh[axis] for axis in dimension) for dimension in over] + [copies] * (copies > 1)
    order = [names.index(axis) for axis in (*used, *rest)]
    devices = np.arange(prod(mesh.values())).reshape(*mesh.values()).transpose(order).ravel()
    last = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, devices))}{last}}}"


__all__ = [
    "Argument",
    "Crashed",
    "Rows",
    "StepRequest",
    "TracedProgram",
    "pass_of",
    "run_apart",
    "trace_programs",
    "trace_step",
]
