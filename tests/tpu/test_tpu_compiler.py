"""Programs of the trainer are taken by the real TPU compiler, for every kind of chip and the layouts of a mesh.

Their memory and their traffic are held against what the trainer means them to have.
"""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import NamedTuple

import pytest
from ahead import AT_ONCE, asked_for
from tpu_programs import LENGTH, SETTINGS, config, trace

from trl_tpu.modeling.model_shape import model_without_weights
from trl_tpu.modeling.work import work_of
from trl_tpu.packing.lengths import PairLengths
from trl_tpu.parallel.chips import parse_topology
from trl_tpu.parallel.mesh import parse_mesh
from trl_tpu.plan.case import Case, Job
from trl_tpu.plan.compile import CompiledProgram, compile_for
from trl_tpu.plan.needs import needed_flops
from trl_tpu.plan.search import memory_refused
from trl_tpu.plan.trace import TracedProgram
from trl_tpu.runtime import Remat, libtpu

CASES = [
    ("packed", "v5p:2x2x1"),
    ("long rows", "v5e:2x2"),
    ("padded", "v5e:2x2"),
    ("adapters, tensor parallel", "v5e:2x4"),
    ("loop, tensor parallel", "v6e:2x4"),
    ("packed, two axes", "v6e:16x16"),
]


class Made(NamedTuple):
    traced: TracedProgram
    compiled: CompiledProgram


def compile_one(traced: Future[TracedProgram], topology: str) -> Made:
    return Made(traced.result(), compile_for(traced.result(), topology))


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, str], Future[Made]]]:
    """The programs of the cases that are asked for; each is traced once."""
    asked = asked_for(request, "name", "topology")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        traced = {name: pool.submit(trace, name) for name in dict.fromkeys(name for name, _ in asked)}
        yield {(name, topology): pool.submit(compile_one, traced[name], topology) for name, topology in asked}


@pytest.mark.parametrize(("name", "topology"), CASES, ids=[f"{name}, {topology}" for name, topology in CASES])
def test_a_program_of_the_trainer_compiles(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    chips, settings = SETTINGS[name]
    traced, compiled = programs[name, topology].result()
    # the compiler pads small arrays to tiles, so that it may need more; but never the whole of what is split
    state = traced.state["weight"] + traced.state["optimizer"]
    assert compiled.state == traced.state and compiled.idle == 0
    batch = 32 * chips * settings.get("length", LENGTH)  # of which some may be on every chip
    assert state <= compiled.arguments <= 1.1 * (state + batch) + 4096 * len(traced.shardings)
    # what changes is overwritten in place
    trained = state if "adapters" not in settings else traced.state["optimizer"]
    assert compiled.aliased >= 0.99 * trained
    assert compiled.flops > 0 and compiled.bytes_moved > 0 and compiled.temporary > 0
    assert (b"tpu_custom_call" in traced.hlo) == ("packed_attention" in settings)
    assert bool(compiled.received) == (chips > 1)


@pytest.mark.parametrize(("name", "topology"), [("long rows", "v5e:2x2")])
def test_nothing_grows_with_the_square_of_the_length(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    length = SETTINGS[name][1]["length"]
    (_, largest), *_ = programs[name, topology].result().compiled.largest_buffers
    assert 0 < largest < 2 * length**2  # a score of two bytes for each two tokens


class Sent(NamedTuple):
    """What one kind of collective gives each chip of arrays that are alike, in bytes."""

    kind: str
    dtype: str
    one: int
    bytes: float


def sent_over(axes: str, compiled: CompiledProgram) -> list[Sent]:
    found = []
    for what, size in compiled.received[axes].items():
        match = re.fullmatch(r"([\w-]+) ([a-z]+)(\d+)\[([\d,]*)\]", what)
        assert match is not None, what
        kind, letters, bits, shape = match.groups()
        one = prod(map(int, filter(None, shape.split(",")))) * int(bits) // 8
        found.append(Sent(kind, letters + bits, one, size))
    return found


@pytest.mark.parametrize(("name", "topology"), [("loop, tensor parallel", "v6e:2x4")])
def test_blocks_are_added_up_over_tensor_once(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """Two blocks of a layer in the forward, the first again for the backward, and two there; in bfloat16.

    Embeddings are added up in float32. A sum comes twice, and half of it a chip has itself.
    """
    block, layers = LENGTH * config().hidden_size * 2, 2
    sent = sent_over("tensor", programs[name, topology].result().compiled)
    added = {each.dtype: each.bytes for each in sent if each.kind == "all-reduce" and each.one >= block}
    assert added == {"bf16": 5 * layers * block, "f32": 2 * block}


@pytest.mark.parametrize(("name", "topology"), [("loop, tensor parallel", "v6e:2x4")])
def test_a_program_fits_in_what_the_plan_says_and_not_in_less(
    name: str,
    topology: str,
    programs: Mapping[tuple[str, str], Future[Made]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The statistics that jax hands on say more of temporary memory.

    With hardly enough memory libtpu orders the program otherwise, and may need a little more or less for it.
    """
    traced, compiled = programs[name, topology].result()

    def in_memory_of(size: float) -> CompiledProgram:
        monkeypatch.setenv(libtpu.VARIABLE, f"--xla_tpu_max_hbm_size_mib={int(size // 2**20)}")
        return compile_for(traced, topology)

    in_memory_of(compiled.arguments + compiled.temporary + compiled.generated_code + 2**20)
    with pytest.raises(RuntimeError) as error:
        in_memory_of(compiled.arguments + 0.75 * compiled.temporary)
    needed = memory_refused(str(error.value))
    assert needed == pytest.approx(compiled.temporary, rel=0.15)


@pytest.mark.parametrize(("name", "topology"), [("padded", "v5e:2x2")])
def test_its_operations_are_those_of_the_formula(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """Plain attention computes every query with every key; the compiler counts single elements' operations too."""
    job = Job(model_without_weights(config(), "float32"), PairLengths.of([(0, LENGTH, LENGTH)]), is_packed=False)
    case = Case(job, parse_topology("v5e:1x1"), parse_mesh("fsdp=-1", 1), Remat.NONE, 1)
    model = job.model
    all_with_all = 2 * model.heads * sum(model.head_dims) * 2 * LENGTH**2 * model.layers
    needed = needed_flops(case).needed + 3 * (all_with_all - work_of(model, case.lengths).attention)
    assert needed <= programs[name, topology].result().compiled.flops <= 1.1 * needed


@pytest.mark.parametrize(("name", "topology"), [("packed, two axes", "v6e:16x16")])
def test_what_cannot_be_compiled_says_so(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    traced = programs[name, topology].result().traced
    with pytest.raises(RuntimeError, match="256 chips, but v5e:2x2 has 4"):
        compile_for(traced, "v5e:2x2")
