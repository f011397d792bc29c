"""Search for layouts that fit: compile them one after the other, the fastest by formula first.

A layout whose least memory is more than a chip has cannot fit, and is left out.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, product

from ..errors import UserError
from ..parallel.chips import Topology
from ..parallel.mesh import MeshShape
from ..runtime import Remat
from .compile import CompiledProgram
from .needs import least_memory, most_pairs_per_second
from .workload import Layout, Workload

#: Compiles one layout. A program that the compiler refuses for its memory raises a RuntimeError that says so.
Compile = Callable[[Layout], CompiledProgram]

PAIRS = (1, 2, 4, 8, 16, 32, 64)
_MOST_TENSOR = 8
_NEARLY = 0.98

# what libtpu 0.0.21 says of a program, and of a single array that is larger than the memory
_OUT_OF_MEMORY = re.compile(
    r"Used [\d.]+[KMGT]? of [\d.]+[KMGT]? hbm|Allocation \(size=\d+\) would exceed memory \(size=\d+\)", re.IGNORECASE
)


@dataclass(frozen=True)
class Attempt:
    """A layout, and its program, or what the compiler says of a chip's memory where it refuses the layout for that."""

    layout: Layout
    program: CompiledProgram | None = None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.program is not None and self.program.peak <= self.layout.topology.chip.memory


def attempt(layout: Layout, compile_layout: Compile) -> Attempt:
    """Compile a layout.

    Raises:
        RuntimeError: The compiler fails for another reason than memory.
    """
    try:
        return Attempt(layout, compile_layout(layout))
    except RuntimeError as error:
        if (found := _OUT_OF_MEMORY.search(str(error))) is None:
            raise
        return Attempt(layout, refusal=found[0])


def search(
    workload: Workload,
    topologies: Iterable[Topology],
    compile_layout: Compile,
    most: int,
    *,
    until_one_fits: bool = False,
) -> list[Attempt]:
    """Compile the ``most`` best layouts on slices, one slice after the other."""
    attempts: list[Attempt] = []
    for layout in islice(chain.from_iterable(candidates(workload, each) for each in topologies), most):
        attempts.append(attempt(layout, compile_layout))
        if until_one_fits and attempts[-1].fits:
            break
    return attempts


def candidates(workload: Workload, topology: Topology) -> list[Layout]:
    """Return layouts that fit by formula, the fastest by formula first.

    Of each mesh and remat policy that is the smallest batch that is nearly as fast as its fastest.
    """
    chosen: list[tuple[float, Layout]] = []
    # layers as a loop are always computed again
    policies = [each for each in Remat if each != Remat.NONE or not workload.args.scan_layers]
    for mesh, remat in product(_meshes(workload, topology.chips), policies):
        layouts = [Layout(workload, topology, mesh, remat, pairs) for pairs in PAIRS]
        may_fit = [each for each in layouts if least_memory(each).bound <= topology.chip.memory]
        rated = [(most_pairs_per_second(each), each) for each in may_fit]
        best = max((rate for rate, _ in rated), default=0)
        chosen += [(rate, each) for rate, each in rated if rate >= _NEARLY * best][:1]
    return [layout for _, layout in sorted(chosen, key=lambda each: -each[0])]


def _meshes(workload: Workload, chips: int) -> Iterator[MeshShape]:
    """Yield all ways to arrange ``chips`` that fit the model."""
    for tensor, data in product(range(1, _MOST_TENSOR + 1), range(1, chips + 1)):
        if chips % (data * tensor) == 0:
            mesh = MeshShape(data, chips // data // tensor, tensor)
            with contextlib.suppress(UserError):  # which says why it does not fit
                workload.placements(mesh)
                yield mesh
