"""The real TPU compiler takes the trainer's programs: chips of three generations, one to 256 of them."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
from ahead import AT_ONCE, asked_for
from tpu_programs import LARGE, LENGTH, SETTINGS, config, trace
from transformers import AutoModelForSequenceClassification

from trl_tpu.preflight.analytic import count_flops, read_model
from trl_tpu.preflight.compile import compile_for
from trl_tpu.preflight.hlo import arrays_of
from trl_tpu.preflight.lengths import PairLengths
from trl_tpu.preflight.program import CompiledProgram
from trl_tpu.preflight.trace import TracedProgram

CASES = [
    *(("packed", topology) for topology in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")),
    ("long rows", "v5e:2x2"),
    ("padded", "v5e:2x2"),
    ("adapters, tensor parallel", "v5e:2x4"),
    *(("layers as a loop", topology) for topology in ("v5p:2x2x2", "v6e:2x4")),
    *(("large weights", topology) for topology in ("v5p:2x2x4", "v6e:4x4")),
    *(("large weights, many chips", topology) for topology in ("v5p:4x4x4", "v6e:8x8")),
    ("large weights, many chips, one by one", "v5p:4x4x4"),
    ("loop, tensor parallel", "v5e:2x4"),
    ("evaluation", "v6e:2x4"),
    *(("packed, two axes", topology) for topology in ("v5e:16x16", "v5p:4x8x8", "v6e:16x16")),
    ("padded, adapters", "v6e:16x16"),
    ("padded, evaluation", "v5p:4x8x8"),
]


class Made(NamedTuple):
    traced: TracedProgram
    compiled: CompiledProgram
    hlo: str


def compile_one(traced: Future[TracedProgram], topology: str, keep: Path) -> Made:
    return Made(traced.result(), compile_for(traced.result(), topology, keep=keep), keep.read_text())


@pytest.fixture(scope="module")
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[tuple[str, str], Future[Made]]]:
    """The programs of the cases that are asked for; each is traced once."""
    asked = asked_for(request, "name", "topology")
    folder = tmp_path_factory.mktemp("hlo")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        traced = {name: pool.submit(trace, name) for name in dict.fromkeys(name for name, _ in asked)}
        yield {
            (name, topology): pool.submit(compile_one, traced[name], topology, folder / f"{number}.hlo")
            for number, (name, topology) in enumerate(asked)
        }


@pytest.mark.parametrize(("name", "topology"), CASES, ids=[f"{name}, {topology}" for name, topology in CASES])
def test_a_program_of_the_trainer_compiles(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    chips, what, settings = SETTINGS[name]
    traced, compiled, hlo = programs[name, topology].result()
    held = traced.bytes_per_chip()
    # the compiler pads small arrays to tiles, so that it may need more; but never the whole of what is split
    state = held["weight"] + held.get("optimizer", 0)
    assert state == compiled.weights + compiled.optimizer
    assert state <= compiled.arguments <= 1.1 * sum(held.values()) + 4096 * len(traced.arguments)
    donated = sum(each.bytes_per_chip for each in traced.arguments if each.donated)
    if what == "train":
        trained = [each for each in traced.arguments if each.kind == "optimizer"]
        assert trained and all(each.donated for each in trained)
        assert compiled.aliased >= 0.99 * donated  # a scalar may stay behind
    else:
        assert donated == 0 and "optimizer" not in held
    assert compiled.flops > 0 and compiled.bytes_accessed > 0 and compiled.temporary > 0
    assert ("tpu_custom_call" in hlo) == ("packed_attention" in settings)
    assert bool(compiled.collectives) == (chips > 1)
    assert {each.kind for each in compiled.collectives} <= {
        "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "topology"), [("long rows", "v5e:2x2")])
def test_nothing_grows_with_the_square_of_the_length(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    length = SETTINGS[name][2]["length"]
    largest = max(prod(shape) for _, shape in arrays_of(programs[name, topology].result().hlo))
    assert length * config().hidden_size <= largest < length**2 / 2


@pytest.mark.parametrize(("name", "topology"), [("loop, tensor parallel", "v5e:2x4")])
def test_blocks_are_added_up_over_tensor_once(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """Two blocks of a layer in the forward, the first again for the backward, and two there; in bfloat16."""
    compiled = programs[name, topology].result().compiled
    layers = 2
    added = [
        each
        for each in compiled.collectives
        if each.kind == "all-reduce" and (0, 1) in each.groups and each.count == layers
    ]
    one = LENGTH * config().hidden_size * 2
    assert {each.dtype for each in added} == {"bf16"}
    assert sum(each.bytes for each in added) == 5 * one


@pytest.mark.parametrize(("name", "topology"), [case for case in CASES if case[0] == "large weights"])
def test_a_large_weight_is_gathered_twice_and_its_gradient_goes_where_it_stays(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """In bfloat16; nowhere is such a gradient added up whole, on 16 chips of two dimensions or three."""
    collectives = programs[name, topology].result().compiled.collectives
    one, layers, chips = LARGE["hidden_size"] * LARGE["intermediate_size"] * 2, 2, 16
    gathered = [each for each in collectives if each.kind == "all-gather" and each.bytes >= one]
    assert {each.dtype for each in gathered} == {"bf16"}
    assert sum(each.bytes * each.count for each in gathered) == 2 * 3 * layers * one
    assert all(each.bytes < one for each in collectives if each.kind == "all-reduce")
    scattered = [each for each in collectives if each.kind == "collective-permute" and each.bytes >= one // chips]
    assert {each.dtype for each in scattered} == {"bf16"}
    moved = sum(each.bytes * each.count for each in scattered)
    assert 1 - 1 / chips <= moved / (3 * layers * one) <= 1 + 1 / chips


@pytest.mark.parametrize(("name", "topology"), [case for case in CASES if "many chips" in case[0]])
def test_over_many_chips_a_large_gradient_is_scattered_first_and_then_added_up_in_parts(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """Over 64 chips: in bfloat16 over 32 of them, and then what each of these has over two.

    libtpu pads what it scatters, so that parts do not begin within a tile: by some percent.
    """
    collectives = programs[name, topology].result().compiled.collectives
    one, layers = LARGE["hidden_size"] * LARGE["intermediate_size"] * 2, 2 if "scan_layers" in SETTINGS[name][2] else 1
    assert all(each.bytes < one for each in collectives if each.kind == "all-reduce")
    scattered = [each for each in collectives if each.kind == "reduce-scatter" and each.bytes >= one]
    assert {(each.dtype, len(each.groups[0])) for each in scattered} == {("bf16", 32)}
    assert 1 <= sum(each.bytes * each.count for each in scattered) / (3 * layers * one) <= 1.05


@pytest.mark.parametrize(("name", "topology"), [("padded", "v5e:2x2")])
def test_its_operations_are_those_of_the_formula(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """Plain attention computes every query with every key."""
    shape = read_model(AutoModelForSequenceClassification.from_config(config()))
    pairs = PairLengths.of([(0, LENGTH, LENGTH)])
    flops = count_flops(shape, pairs)
    all_with_all = 2 * shape.heads * sum(shape.head_dims) * 2 * LENGTH**2 * shape.layers
    needed = flops.useful + 3 * (all_with_all - flops.attention)
    assert programs[name, topology].result().compiled.flops == pytest.approx(needed, rel=0.01)


@pytest.mark.parametrize(("name", "topology"), [("evaluation", "v6e:2x4")])
def test_what_cannot_be_compiled_says_so(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    traced = programs[name, topology].result().traced
    with pytest.raises(RuntimeError, match="8 chips, but v5e:2x2 has 4"):
        compile_for(traced, "v5e:2x2")
