"""What would fit, and what would be fast: other ways to train the same, each tried with the compiler.

Nothing here is guessed but the order in which ways are tried: a way whose least memory is more than a chip has cannot
fit, and is left out; the others are compiled, those first that are fastest by formula.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..parallel.mesh import MeshShape
from .case import Case
from .chips import Topology
from .job import Job
from .memory import least_memory
from .program import CompiledProgram
from .report import peak_memory
from .roofline import Roofline, compiled_roofline, estimated_roofline
from .trace import Crashed

#: Compiles one case. A program that the compiler refuses for its memory raises an error that says so.
CompileStep = Callable[[Case], CompiledProgram]

REMATS = ("none", "dots", "full")
PAIRS = (1, 2, 4, 8, 16, 32, 64)
_MOST_TENSOR = 8
_NEARLY = 0.98

# what libtpu 0.0.21 says of a program, and of a single array that is larger than the memory
_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_ARGUMENTS = re.compile(r"^\s+arguments\s+([\d.]+)([KMGT]?)", re.MULTILINE)  # which "used" has in it
_TOO_LARGE = re.compile(r"Allocation \(size=(\d+)\) would exceed memory")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Attempt:
    """A case and what the compiler said.

    Args:
        program: None if the compiler refused it for its memory, crashed, or was not asked.
        needed: Bytes of a chip's memory: of the program, by the compiler's refusal, or at least by formula.
        available: Bytes that there are.
        what: What was changed, in words.
        compiled: Whether the compiler was asked.
        crash: What is known of a crash of the compiler; whether it would fit is then open.
    """

    case: Case
    program: CompiledProgram | None
    needed: int
    available: int
    what: str = ""
    compiled: bool = True
    crash: str = ""

    @property
    def is_open(self) -> bool:
        """Whether nobody knows if it fits: the compiler crashed, and by formula it may."""
        return bool(self.crash) and self.needed <= self.available

    @property
    def fits(self) -> bool:
        return self.program is not None and self.needed <= self.available

    @property
    def times(self) -> Roofline:
        if self.program is None:
            return estimated_roofline(self.case)
        return compiled_roofline(self.case, self.program)

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "topology": str(self.case.topology),
            "mesh": self.case.mesh.sizes,
            "remat": self.case.remat,
            "pairs": self.case.pairs,
            "rows": self.case.rows,
            "row_length": self.case.length,
            "compiled": self.compiled,
            "crash": self.crash,
            "fits": self.fits,
            "memory_needed": self.needed,
            "memory_available": self.available,
            "pairs_per_second_at_best": self.times.most_pairs_per_second if self.fits else None,
            "limit": self.times.limit if self.fits else None,
        }


def attempt(case: Case, compile_step: CompileStep, what: str = "") -> Attempt:
    """Ask the compiler.

    Raises:
        RuntimeError: If it fails for another reason than memory, unless it crashes.
    """
    available, least = case.topology.chip.memory, least_memory(case)
    try:
        program = compile_step(case)
    except Crashed as error:
        return Attempt(case, None, least.bound, available, what, crash=str(error))
    except RuntimeError as error:
        temporary = memory_refused(str(error))
        if temporary is None:
            raise
        return Attempt(case, None, max(temporary + least.weights + least.optimizer, least.bound), available, what)
    return Attempt(case, program, peak_memory(program), available, what)


def memory_refused(message: str) -> int | None:
    """Bytes that a program needs besides its arguments, from the error of a compiler that ran out of memory.

    None for other errors.
    """
    if found := _OUT_OF_MEMORY.search(message):
        arguments = _ARGUMENTS.search(message)
        return _bytes(found) - (_bytes(arguments) if arguments else 0)
    found = _TOO_LARGE.search(message)
    return int(found[1]) if found else None


def _bytes(found: re.Match[str]) -> int:
    return int(float(found[1]) * _UNITS[found[2].upper()])


def remedies(job: Job, case: Case) -> Iterator[tuple[str, Case]]:
    """Changes that need less memory, from the mildest: each alone first, and then together."""
    pairs = case.pairs // case.mesh.batch_shards
    mesh, topology = case.mesh, case.topology

    def changed(what: str, **changes: Any) -> Iterator[tuple[str, Case]]:
        settings: dict[str, Any] = {"topology": topology, "mesh": mesh, "remat": case.remat, "pairs_per_part": pairs}
        settings |= changes
        try:
            yield what, job.case(**settings)
        except ValueError:
            return  # such a mesh does not fit the model

    whole = MeshShape(fsdp=mesh.devices // mesh.tensor, tensor=mesh.tensor)
    for remat in REMATS[REMATS.index(case.remat) + 1 :]:
        yield from changed(f"--remat {remat}", remat=remat)
    if mesh.data > 1:
        yield from changed(f"--mesh {whole}", mesh=whole)
    halved = pairs
    while halved > 1:
        halved //= 2
        yield from changed(f"--per_device_train_batch_size {halved}", pairs_per_part=halved)
    if pairs > 1 or case.remat != "full" or mesh.data > 1:
        together = f"--mesh {whole} --remat full --per_device_train_batch_size 1"
        yield from changed(together, mesh=whole, remat="full", pairs_per_part=1)
    larger = topology.larger()
    while larger is not None:
        if larger.chips % mesh.tensor == 0:
            all_split = MeshShape(fsdp=larger.chips // mesh.tensor, tensor=mesh.tensor)
            yield from changed(f"--topology {larger} --mesh {all_split}", topology=larger, mesh=all_split)
        larger = larger.larger()


def try_remedies(job: Job, case: Case, compile_step: CompileStep, most: int = 4) -> list[Attempt]:
    """Compile changes until one fits, at most ``most``; those that cannot fit are listed, but not compiled."""
    tried: list[Attempt] = []
    asked = 0
    for what, changed in remedies(job, case):
        least, available = least_memory(changed).bound, changed.topology.chip.memory
        if least > available:
            tried.append(Attempt(changed, None, least, available, what, compiled=False))
            continue
        if asked == most:
            break
        asked += 1
        tried.append(attempt(changed, compile_step, what))
        if tried[-1].fits:
            break
    return tried


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        attempts: Those compiled, the best first.
        too_large: How many ways need more memory by formula than there is.
        left: How many more might fit, but were not compiled.
    """

    attempts: tuple[Attempt, ...]
    too_large: int
    left: int


def meshes(chips: int) -> list[MeshShape]:
    """All ways to arrange ``chips``."""
    sizes = [size for size in range(1, chips + 1) if chips % size == 0]
    return [
        MeshShape(data, chips // data // tensor, tensor)
        for tensor in sizes
        for data in sizes
        if tensor <= _MOST_TENSOR and chips % (data * tensor) == 0
    ]


def search(job: Job, topology: Topology, compile_step: CompileStep, most: int = 6) -> Found:
    """The best meshes, remat policies and batch sizes for a slice, by pairs a second.

    Args:
        most: How many to compile: the fastest by formula among those that fit by formula.
    """
    chosen: list[tuple[float, Case]] = []
    counted = too_large = 0
    for mesh, remat in product(meshes(topology.chips), REMATS):
        try:
            cases = [job.case(topology, mesh, remat, pairs) for pairs in PAIRS]
        except ValueError:
            continue  # the mesh does not fit the model
        may_fit = [case for case in cases if least_memory(case).bound <= topology.chip.memory]
        counted, too_large = counted + len(may_fit), too_large + len(cases) - len(may_fit)
        if may_fit:
            chosen.append(_frugal(may_fit))
    chosen.sort(key=lambda rated: -rated[0])
    attempts = [attempt(case, compile_step) for _, case in chosen[:most]]
    attempts.sort(key=lambda each: (not each.fits, -each.times.most_pairs_per_second))
    return Found(tuple(attempts), too_large, counted - len(attempts))


def _frugal(cases: list[Case]) -> tuple[float, Case]:
    """The smallest batch that is by formula nearly as fast as the fastest of ``cases``, and how fast."""
    rates = [estimated_roofline(case).most_pairs_per_second for case in cases]
    return next((rate, case) for rate, case in zip(rates, cases, strict=True) if rate >= _NEARLY * max(rates))


__all__ = ["Attempt", "CompileStep", "Found", "attempt", "memory_refused", "remedies", "search", "try_remedies"]
