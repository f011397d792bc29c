"""What would fit, and what would be fast: other ways to train the same, each tried with the compiler.

Nothing here is guessed but the order in which ways are tried: a way whose least memory is more than a chip has cannot
fit, and is left out; the others are compiled.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import UserError
from ..parallel.chips import Topology
from ..parallel.mesh import MeshShape
from ..runtime import Remat
from .apart import Crashed
from .case import Case, Job
from .compile import CompiledProgram
from .needs import least_memory
from .report import Report, estimated_pairs_per_second

#: Compiles one case. A program that the compiler refuses for its memory raises an error that says so.
CompileStep = Callable[[Case], CompiledProgram]

PAIRS = (1, 2, 4, 8, 16, 32, 64)
_MOST_TENSOR = 8
_NEARLY = 0.98

# what libtpu 0.0.21 says of a program, and of a single array that is larger than the memory
_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_ARGUMENTS = re.compile(r"^\s+arguments\s+([\d.]+)([KMGT]?)", re.MULTILINE)  # which "used" has in it
_TOO_LARGE = re.compile(r"Allocation \(size=(\d+)\) would exceed memory")


@dataclass(frozen=True)
class Attempt:
    """A case and what the compiler said.

    Args:
        needed: Bytes of a chip's memory: of the program, by the compiler's refusal, or at least by formula.
        report: None if the compiler refused it for its memory, or crashed.
        crash: What is known of a crash of the compiler.
    """

    case: Case
    needed: int
    report: Report | None = None
    crash: str = ""

    @property
    def is_open(self) -> bool:
        """Whether nobody knows if it fits: the compiler crashed, and by formula it may."""
        return bool(self.crash) and self.needed <= self.case.available

    @property
    def fits(self) -> bool:
        return self.report is not None and self.report.fits

    @property
    def flags(self) -> str:
        """What to say to the training for it."""
        case = self.case
        return f"--mesh {case.mesh} --remat {case.remat} --per_device_train_batch_size {case.pairs_per_part}"

    def as_json(self) -> dict[str, Any]:
        report = self.report if self.fits else None
        return self.case.as_json() | {
            "flags": self.flags,
            "crash": self.crash,
            "fits": self.fits,
            "memory": {"needed": self.needed, "available": self.case.available},
            "pairs_per_second": report and report.pairs_per_second,
            "limit": report and report.limit,
        }


def attempt(case: Case, compile_step: CompileStep) -> Attempt:
    """Ask the compiler.

    Raises:
        RuntimeError: If it fails for another reason than memory, unless it crashes.
    """
    least = least_memory(case)
    try:
        report = Report(case, compile_step(case))
    except Crashed as error:
        return Attempt(case, least.bound, crash=str(error))
    except RuntimeError as error:
        temporary = memory_refused(str(error))
        if temporary is None:
            raise
        return Attempt(case, max(temporary + least.weights + least.optimizer, least.bound))
    return Attempt(case, report.program.peak, report)


def memory_refused(message: str) -> int | None:
    """Bytes besides arguments at which the compiler refused a program, by its message; None for another error."""
    if array := _TOO_LARGE.search(message):
        return int(array[1])
    used, arguments = _OUT_OF_MEMORY.search(message), _ARGUMENTS.search(message)
    return None if used is None else _bytes(used) - (_bytes(arguments) if arguments else 0)


def _bytes(size: re.Match[str]) -> int:
    return int(float(size[1]) * 1024 ** " KMGT".index(size[2].upper() or " "))


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        attempts: Those compiled, the best first.
    """

    topology: Topology
    attempts: list[Attempt]


def search(
    job: Job, topology: Topology, compile_step: CompileStep, most: int = 6, *, until_one_fits: bool = False
) -> Found:
    """The best meshes, remat policies and batch sizes for a slice, by pairs a second.

    Args:
        most: How many to compile: the fastest by formula among those that fit by formula, of each mesh and policy the
            smallest batch that is nearly as fast as its fastest.
    """
    chosen: list[tuple[float, Case]] = []
    for mesh, remat in product(_meshes(job, topology.chips), Remat):
        cases = [Case(job, topology, mesh, remat, pairs) for pairs in PAIRS]
        may_fit = [case for case in cases if least_memory(case).bound <= topology.chip.memory]
        rated = [(estimated_pairs_per_second(case), case) for case in may_fit]
        best = max((rate for rate, _ in rated), default=0)
        chosen += [(rate, case) for rate, case in rated if rate >= _NEARLY * best][:1]
    chosen.sort(key=lambda each: -each[0])
    attempts: list[Attempt] = []
    for _, case in chosen[:most]:
        attempts.append(attempt(case, compile_step))
        if until_one_fits and attempts[-1].fits:
            break
    attempts.sort(key=lambda each: -each.report.pairs_per_second[0] if each.report and each.fits else 0)
    return Found(topology, attempts)


def remedies(job: Job, topology: Topology, compile_step: CompileStep, most: int) -> Found:
    """A way that fits a slice or, if none does, a larger one; with at most ``most`` compiled, until one fits."""
    for each in (topology, *topology.larger()):
        found = search(job, each, compile_step, most, until_one_fits=True)
        most -= len(found.attempts)
        if most <= 0 or any(attempt.fits for attempt in found.attempts):
            break
    return found


def _meshes(job: Job, chips: int) -> Iterator[MeshShape]:
    """All ways to arrange ``chips`` that fit the model."""
    for tensor, data in product(range(1, _MOST_TENSOR + 1), range(1, chips + 1)):
        if chips % (data * tensor) == 0:
            mesh = MeshShape(data, chips // data // tensor, tensor)
            with contextlib.suppress(UserError):  # which says why it does not fit
                job.placements(mesh)
                yield mesh
