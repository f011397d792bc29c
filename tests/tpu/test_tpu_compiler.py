"""The real TPU compiler takes the trainer's programs: chips of three generations, one to 256 of them.

Their memory and their traffic are held against what the mesh and the mathematics need.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from ahead import AT_ONCE, asked_for
from transformers import LlamaConfig

from trl_tpu.parallel.mesh import parse_mesh
from trl_tpu.preflight.case import Case, Job
from trl_tpu.preflight.chips import parse_topology
from trl_tpu.preflight.compile import CompiledProgram, compile_for
from trl_tpu.preflight.lengths import PairLengths
from trl_tpu.preflight.model_shape import model_without_weights
from trl_tpu.preflight.needs import least_traffic, needed_flops
from trl_tpu.preflight.trace import StepRequest, TracedProgram, trace_step

LENGTH = 256
EXPANDED = {"packed_attention": "expanded"}
PADDED = {"packing": "false"}
LARGE = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 8}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "packed": (1, EXPANDED),
    "long rows": (1, EXPANDED | {"length": 4096}),
    "padded": (1, PADDED | {"remat": "none"}),
    "adapters, tensor parallel": (8, EXPANDED | {"adapters": True, "mesh": "fsdp=4,tensor=2", "remat": "dots"}),
    "large weights, a loop": (16, EXPANDED | {"scan_layers": True, "length": 2048, "sizes": LARGE}),
    "packed, two axes": (256, EXPANDED | {"mesh": "data=4,fsdp=64"}),
}
CASES = [
    ("packed", "v5p:2x2x1"),
    ("long rows", "v5e:2x2"),
    ("padded", "v5e:2x2"),
    ("adapters, tensor parallel", "v5e:2x4"),
    ("large weights, a loop", "v6e:4x4"),
    ("packed, two axes", "v6e:16x16"),
]


class Made(NamedTuple):
    traced: TracedProgram
    compiled: CompiledProgram


def config(layers: int = 1, **sizes: int) -> LlamaConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    usual = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    return LlamaConfig(num_labels=1, **heads | usual | sizes)


def config_of(name: str) -> LlamaConfig:
    settings = SETTINGS[name][1]
    return config(layers=2 if "scan_layers" in settings else 1, **settings.get("sizes", {}))


def trace(name: str) -> TracedProgram:
    chips, settings = SETTINGS[name]
    arguments: dict[str, Any] = {"per_device_train_batch_size": 1} | settings
    peft = lora() if arguments.pop("adapters", False) else None
    length, _ = arguments.pop("length", LENGTH), arguments.pop("sizes", None)
    pairs = parse_mesh(arguments.get("mesh", "fsdp=-1"), chips).batch_shards
    rows = None if settings.get("packing") == "false" else pairs
    return trace_step(StepRequest(config_of(name), chips, pairs, length, rows, arguments, peft))


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])


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
    batch = 64 * settings.get("length", LENGTH)
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
    length, heads = SETTINGS[name][1]["length"], config().num_attention_heads
    assert programs[name, topology].result().compiled.temporary < heads * length**2


@pytest.mark.parametrize(("name", "topology"), [("large weights, a loop", "v6e:4x4")])
def test_large_weights_are_gathered_twice_and_their_gradients_go_where_they_stay(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """In bfloat16, for every turn of the loop; a gradient that is added up whole would come twice."""
    chips, settings = SETTINGS[name]
    job = Job(model_without_weights(config_of(name), "float32"), PairLengths.of_size(settings["length"]))
    case = Case(job, parse_topology(topology), parse_mesh("fsdp=-1", chips), "full", 1)
    received = programs[name, topology].result().compiled.received["fsdp"]
    assert 0.95 <= sum(received.values()) / least_traffic(case)["fsdp"] <= 1.2
    in_bfloat16 = sum(size for kind, size in received.items() if kind.endswith("bf16"))
    assert in_bfloat16 >= 0.9 * sum(received.values())


@pytest.mark.parametrize(("name", "topology"), [("padded", "v5e:2x2")])
def test_its_operations_are_those_of_the_formula(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    """Plain attention computes every query with every key; the compiler counts single elements' operations too."""
    job = Job(model_without_weights(config(), "float32"), PairLengths.of([(0, LENGTH, LENGTH)]), is_packed=False)
    flops = needed_flops(Case(job, parse_topology("v5e:1x1"), parse_mesh("fsdp=-1", 1), "none", 1))
    model = job.model
    all_with_all = 2 * model.heads * sum(model.head_dims) * 2 * LENGTH**2 * model.layers
    needed = flops.needed + 3 * (all_with_all - flops.attention)
    assert needed <= programs[name, topology].result().compiled.flops <= 1.1 * needed


@pytest.mark.parametrize(("name", "topology"), [("packed, two axes", "v6e:16x16")])
def test_what_cannot_be_compiled_says_so(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[Made]]
) -> None:
    traced = programs[name, topology].result().traced
    with pytest.raises(RuntimeError, match="256 chips, but v5e:2x2 has 4"):
        compile_for(traced, "v5e:2x2")
