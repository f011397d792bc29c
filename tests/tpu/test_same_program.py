"""The program traced with placeholders equals a real trainer's, instruction by instruction."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import PARALLEL_COMPILES, selected_cases
from transformers import LlamaConfig

from trl_tpu.modeling.head_spec import HeadSpec
from trl_tpu.plan.compile import TracedProgram, call_in_child, virtual_devices
from trl_tpu.plan.trace import StepRequest, make_trainer, trace_step

CHIPS = 4
CONFIG = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])


# for each linear layer two matrices of rank 4; and the score head
TRAINED_BY_ADAPTERS = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)) + 64

CASES: dict[str, dict[str, Any]] = {
    "packed": {"token_rows": 4},
    "rankings": {"token_rows": 4, "answers": 3},
    "steps": {"token_rows": 4, "answers": 3, "model": {"step_separator": "\n"}},
    "attributes, padded": {
        "answers": 3,
        "model": {"attribute_weights": [0.5, 0.5], "id2label": {0: "a", 1: "b"}},
        "arguments": {"attributes": ["a", "b"], "packing": "false"},
    },
    "padded, tensor parallel": {
        "length": 64,
        "dtype": "bfloat16",
        "arguments": {"packing": "false", "mesh": "fsdp=2,tensor=2", "remat": "dots"},
    },
    "adapters, accumulated gradients": {
        "token_rows": 4,
        "arguments": {"gradient_accumulation_steps": 2, "remat": "none"},
        "peft": lora,
    },
    "layers as a loop": {
        "token_rows": 4,
        "arguments": {"scan_layers": True, "mesh": "fsdp=2,tensor=2", "per_device_train_batch_size": 4},
    },
}


def request_of(name: str) -> StepRequest:
    case = {"length": 128} | CASES[name]
    own, peft, model = (case.pop(name, {}) for name in ("arguments", "peft", "model"))
    sizes = {"per_device_train_batch_size": 2}
    return StepRequest(
        LlamaConfig(**CONFIG, **model), CHIPS, arguments=sizes | own, peft=peft() if peft else None, **case
    )


Traced, Written = Future[TracedProgram], Future[list[bytes]]


@pytest.fixture(scope="module")
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, tuple[Traced, Written]]]:
    """Return the traced programs and those of a real trainer."""
    with ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        yield {
            name: (
                pool.submit(trace_step, request_of(name)),
                pool.submit(real_programs, request_of(name), tmp_path_factory.mktemp("run")),
            )
            for name in selected_cases(request, "name")
        }


@pytest.mark.parametrize("name", CASES)
def test_traced_program_equals_a_real_trainers(name: str, programs: Mapping[str, tuple[Traced, Written]]) -> None:
    traced, written = (each.result() for each in programs[name])
    real = next((each for each in written if listing(each) == listing(traced.hlo)), None)
    assert real is not None
    assert layouts_of(real) == dict(enumerate(traced.shardings))
    assert donors_of(real) == [number for number, is_donated in enumerate(traced.donated) if is_donated] != []
    # state that the program does not read: scalars; with accumulated gradients also Adam's moments and the next batch,
    # which is 3 arrays [1, 128] of tokens per chip and its table of comparisons
    waiting = 2 * 4 * TRAINED_BY_ADAPTERS // CHIPS + 3 * 4 * 128 if "accumulated" in name else 0
    assert waiting <= traced.idle <= waiting + 2048


def real_programs(request: StepRequest, folder: Path) -> list[bytes]:
    """Return every program that a real trainer passes to XLA in two steps on virtual devices."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_as_proto --xla_dump_hlo_pass_re=^$"
    environment = virtual_devices(request.chips) | {"XLA_FLAGS": flags}
    call_in_child(take_two_steps, request, str(folder), environment=environment)
    return [module_of(file.read_bytes()) for file in folder.glob("*before_optimizations.hlo.pb")]


def take_two_steps(request: StepRequest, folder: str) -> None:
    outputs = HeadSpec.of(request.model)
    request.model.num_labels = len(outputs.weights)
    model = outputs.auto_class.from_config(request.model, dtype=getattr(torch, request.dtype))
    make_trainer(request, model, folder).train()


def module_of(message: bytes) -> bytes:
    """Return the module in a HloProto: field 1, whose length is a varint of 7-bit groups."""
    assert message[0] == 0x0A
    length, shift, at = 0, 0, 1
    while True:
        length |= (message[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if message[at - 1] < 0x80:
            return message[at : at + length]


def text_of(module: bytes) -> str:
    from jaxlib import _jax

    return _jax.HloModule.from_serialized_hlo_module_proto(module).to_string(_jax.HloPrintOptions.fingerprint())


def listing(module: bytes) -> list[str]:
    """Return all instructions without names, origins and layouts of arguments, which placeholders do not have.

    The first line is dropped: a real run's has more details, such as donated buffers.
    """
    return [re.sub(r"( parameter\(\d+\)), sharding=.*", r"\1", line) for line in text_of(module).splitlines()[1:]]


def layouts_of(module: bytes) -> dict[int, str]:
    # layouts in computations of a loop, which are printed at their call, have more indentation
    entry = text_of(module).partition("\nENTRY ")[2]
    found = re.findall(r"^  \w.* parameter\((\d+)\), sharding=(\{.*?\})$", entry, re.MULTILINE)
    return {int(number): sharding for number, sharding in found}


def donors_of(module: bytes) -> list[int]:
    found = re.search(r"buffer_donor=\{(.*?) \}, ", text_of(module).splitlines()[0])
    return [int(number) for number in re.findall(r"\((\d+), \{\}\)", found[1])] if found else []


def test_plan_rejects_what_the_trainer_rejects() -> None:
    with pytest.raises(RuntimeError, match="fsdp=3"):
        trace_step(StepRequest(LlamaConfig(**CONFIG), CHIPS, length=128, token_rows=4, arguments={"mesh": "fsdp=3"}))
