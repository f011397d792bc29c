"""The real TPU compiler compiles the trainer's programs for every kind of chip and for several meshes.

Their memory is compared with the state per chip in the sharding plan, and with compilations for less memory.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from peft import LoraConfig
from subprocesses import PARALLEL_COMPILES, selected_cases
from transformers import LlamaConfig

from trl_tpu.modeling.adapters import add_adapters
from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.parallel.mesh import parse_mesh
from trl_tpu.parallel.shard import plan_model
from trl_tpu.plan.compile import CompiledProgram, TracedProgram, compile_for
from trl_tpu.plan.layouts import attempt
from trl_tpu.plan.trace import StepRequest, trace_step
from trl_tpu.runtime import device_choice as libtpu

CASES = [
    *(("packed", "v5p:2x2x1"), ("long rows", "v5e:2x2"), ("padded", "v5e:2x2")),
    *(("adapters, tensor parallel", "v5e:2x4"), ("loop, tensor parallel", "v6e:2x4")),
    ("packed, two axes", "v6e:16x16"),
]
LENGTH = 256
EXPANDED = {"packed_attention": "expanded"}
ON_HOST = {"activation_offloading": True}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "packed": (1, EXPANDED),
    "long rows": (1, EXPANDED | {"length": 4096}),
    "padded": (1, {"packing": "false", "remat": "none"}),
    "adapters, tensor parallel": (8, EXPANDED | {"adapters": True, "mesh": "fsdp=4,tensor=2", "remat": "dots"}),
    "loop, tensor parallel": (8, EXPANDED | {"scan_layers": True, "mesh": "fsdp=4,tensor=2"} | ON_HOST),
    "packed, two axes": (256, EXPANDED | {"mesh": "data=4,fsdp=64"}),
}
"""Number of chips and trainer arguments of each case; "length" is the row length."""


def config_of(name: str) -> LlamaConfig:
    layers = 2 if "scan_layers" in SETTINGS[name][1] else 1
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    return LlamaConfig(num_labels=1, **heads | sizes)


def trace(name: str) -> TracedProgram:
    chips, settings = SETTINGS[name]
    arguments: dict[str, Any] = {"per_device_train_batch_size": 1} | settings
    peft = lora() if arguments.pop("adapters", False) else None
    length = arguments.pop("length", LENGTH)
    pairs = parse_mesh(arguments.get("mesh", "fsdp=-1"), chips).batch_shards
    rows = None if settings.get("packing") == "false" else pairs
    return trace_step(StepRequest(config_of(name), chips, length, rows, arguments, peft))


def lora() -> Any:
    return LoraConfig(r=8, task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])


class CompiledCase(NamedTuple):
    traced: TracedProgram
    compiled: CompiledProgram


def compile_one(traced: Future[TracedProgram], topology: str) -> CompiledCase:
    return CompiledCase(traced.result(), compile_for(traced.result(), topology))


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, str], Future[CompiledCase]]]:
    """Return the programs of the selected cases; each is traced once."""
    asked = selected_cases(request, "name", "topology")
    with ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        traced = {name: pool.submit(trace, name) for name in dict.fromkeys(name for name, _ in asked)}
        yield {(name, topology): pool.submit(compile_one, traced[name], topology) for name, topology in asked}


def state_per_chip(name: str) -> tuple[int, int]:
    """Return bytes of weights and moments per chip in the sharding plan, and of unsharded matrices in bfloat16."""
    chips, settings = SETTINGS[name]
    model = model_without_weights(config_of(name), "float32")
    if "adapters" in settings:
        model = add_adapters(model, lora())
    mesh, state, matrices = parse_mesh(settings.get("mesh", "fsdp=-1"), chips), 0, 0
    plan = plan_model(model, mesh)
    for weight_name, weight in model.named_parameters():
        numbers = weight.numel() // plan.place(weight_name, tuple(weight.shape)).parts(mesh)
        state += 4 * numbers * (3 if weight.requires_grad else 1)
        matrices += 2 * weight.numel() if "layers" in weight_name and weight.dim() > 1 else 0
    return state, matrices


@pytest.mark.parametrize(("name", "topology"), CASES, ids=[f"{name}, {topology}" for name, topology in CASES])
def test_program_arguments_are_the_sharded_state_and_are_donated(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[CompiledCase]]
) -> None:
    chips, settings = SETTINGS[name]
    (traced, compiled), (state, _) = programs[name, topology].result(), state_per_chip(name)
    # the compiler pads small arrays to tiles, so it may need more, but never the unsharded size
    batch = 32 * chips * settings.get("length", LENGTH)
    assert state <= compiled.arguments <= 1.1 * (state + batch) + 4096 * len(traced.shardings)
    # updated state is overwritten in place; the other outputs are a few numbers, each padded to a tile
    assert compiled.results < 2**13
    assert compiled.temporary > 0
    assert (b"annotate_device_placement" in traced.hlo) == ("activation_offloading" in settings)
    assert (b"tpu_custom_call" in traced.hlo) == ("packed_attention" in settings)


@pytest.mark.parametrize(("name", "topology"), [("packed, two axes", "v6e:16x16")])
def test_fsdp_receives_weights_twice_and_gradients_once(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[CompiledCase]]
) -> None:
    """The compiler counts loops once, so programs with loops are not checked."""
    compiled = programs[name, topology].result().compiled
    matrices, shards = state_per_chip(name)[1], 64
    assert 3 * matrices * (1 - 1 / shards) <= compiled.received <= 2 * 3 * matrices
    assert compiled.flops > 0


@pytest.mark.parametrize(("name", "topology"), [("long rows", "v5e:2x2")])
def test_memory_is_not_quadratic_in_the_length(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[CompiledCase]]
) -> None:
    """The limit is one head's attention scores: two bytes for each pair of tokens."""
    assert programs[name, topology].result().compiled.temporary < 4 * 2 * SETTINGS[name][1]["length"] ** 2


@pytest.mark.parametrize(("name", "topology"), [("loop, tensor parallel", "v6e:2x4")])
def test_program_fits_the_planned_memory_and_no_less(
    name: str, topology: str, programs: Mapping[tuple[str, str], Future[CompiledCase]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics from jax overestimate temporary memory.

    With barely enough memory libtpu reorders the program, which then may need slightly more or less.
    """
    traced, compiled = programs[name, topology].result()

    def in_memory_of(size: float) -> CompiledProgram:
        monkeypatch.setenv(libtpu.VARIABLE, f"--xla_tpu_max_hbm_size_mib={int(size // 2**20)}")
        return compile_for(traced, topology)

    in_memory_of(compiled.arguments + compiled.temporary + compiled.generated_code + 2**20)
    too_little = compiled.arguments + 0.75 * compiled.temporary
    assert attempt(None, lambda _: in_memory_of(too_little)).error.startswith("Used ")  # type: ignore[arg-type]
