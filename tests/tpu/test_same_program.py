"""What is traced with placeholders is what a real trainer runs, instruction by instruction."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ahead import AT_ONCE, asked_for
from places import ROOT
from transformers import LlamaConfig

from trl_tpu.preflight.trace import Rows, StepRequest, TracedProgram, pass_of, trace_programs

CHIPS = 4
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])


CASES: dict[str, dict[str, Any]] = {
    "packed": {"batch": Rows(pairs=8, length=128, rows=4)},
    "padded, tensor parallel": {
        "batch": Rows(pairs=4, length=64),
        "dtype": "bfloat16",
        "arguments": {"packing": "false", "mesh": "fsdp=2,tensor=2", "remat": "dots"},
    },
    "evaluation": {"batch": Rows(pairs=8, length=128, rows=4), "what": "evaluate"},
    "adapters, gradients that add up": {
        "batch": Rows(pairs=8, length=128, rows=4),
        "arguments": {"gradient_accumulation_steps": 2, "remat": "none"},
        "peft": lora,
    },
    "layers as a loop": {
        "batch": Rows(pairs=8, length=128, rows=4),
        "arguments": {"scan_layers": True, "mesh": "fsdp=2,tensor=2"} | {"per_device_train_batch_size": 4},
    },
}


def request_of(name: str) -> StepRequest:
    case = dict(CASES[name])
    own, peft = case.pop("arguments", {}), case.pop("peft", None)
    sizes = {f"per_device_{each}_batch_size": 2 for each in ("train", "eval")}
    return StepRequest(LlamaConfig(**CONFIG), CHIPS, arguments=sizes | own, peft=peft and peft(), **case)


Traced, Written = Future[tuple[TracedProgram, ...]], Future[list[bytes]]


@pytest.fixture(scope="module")
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, tuple[Traced, Written]]]:
    """What is traced, and what a real trainer runs."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            name: (
                pool.submit(trace_programs, request_of(name)),
                pool.submit(programs_of_a_real_run, request_of(name), tmp_path_factory.mktemp("run")),
            )
            for (name,) in asked_for(request, "name")
        }


@pytest.mark.parametrize("name", CASES)
def test_the_traced_programs_are_those_of_a_real_trainer(
    name: str, programs: Mapping[str, tuple[Traced, Written]]
) -> None:
    request = request_of(name)
    traced, written = (each.result() for each in programs[name])
    assert len(traced) == (2 if "gradients" in name else 1)
    for program in traced:
        real = next((each for each in written if listing(each) == listing(program.hlo)), None)
        assert real is not None
        assert layouts_of(real) == {number: each.sharding for number, each in enumerate(program.arguments)}
        assert donors_of(real) == [number for number, each in enumerate(program.arguments) if each.donated]
        assert bool(donors_of(real)) == (request.what == "train")


@pytest.mark.parametrize("name", ["adapters, gradients that add up", "padded, tensor parallel"])
def test_all_state_is_known_whichever_program_takes_it(
    name: str, programs: Mapping[str, tuple[Traced, Written]]
) -> None:
    traced = programs[name][0].result()
    step = pass_of(traced)
    state, taken = step.state_per_chip(), step.bytes_per_chip()
    changed = [each for program in traced for each in program.arguments if each.kind == "optimizer"]
    trained = {each.name.partition(" of ")[2]: each.bytes_per_chip for each in changed if each.shape}
    assert trained and sum(trained.values()) <= state["optimizer"] // 2 <= sum(trained.values()) + 4 * len(changed)
    if len(traced) > 1:
        assert state["gradient"] == sum(trained.values())
        assert "batch" in taken and "optimizer" not in taken
        assert sum(each.bytes_per_chip for each in step.beside) == state["optimizer"]
    else:
        assert step.beside == () and {each.dtype for each in step.arguments if each.kind == "weight"} == {"bfloat16"}


def programs_of_a_real_run(request: StepRequest, folder: Path) -> list[bytes]:
    """Every program that two steps, or an evaluation, give to XLA."""
    (folder / "request").write_bytes(pickle.dumps(request))
    process = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "real_step.py"), str(folder / "request"), str(folder / "dump")],
        env=os.environ
        | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(request.chips), "USE_TORCH_XLA": "1"}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [first_field(file.read_bytes()) for file in (folder / "dump").glob("*before_optimizations.hlo.pb")]


def first_field(message: bytes) -> bytes:
    """The module in a HloProto: its field 1, of a length that is written in groups of 7 bits."""
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
    """All instructions without names and origins, nor layouts of arguments, of which placeholders have none.

    The first line is left out: that of a real run says more, such as what is donated.
    """
    return [re.sub(r"( parameter\(\d+\)), sharding=.*", r"\1", line) for line in text_of(module).splitlines()[1:]]


def layouts_of(module: bytes) -> dict[int, str]:
    # those of a loop's computations, which are printed where they are called, are indented more
    entry = text_of(module).partition("\nENTRY ")[2]
    found = re.findall(r"^  \w.* parameter\((\d+)\), sharding=(\{.*?\})$", entry, re.MULTILINE)
    return {int(number): sharding for number, sharding in found}


def donors_of(module: bytes) -> list[int]:
    found = re.search(r"buffer_donor=\{(.*?) \}, ", text_of(module).splitlines()[0])
    return [int(number) for number in re.findall(r"\((\d+), \{\}\)", found[1])] if found else []


def test_a_batch_of_another_size_than_the_arguments_say_is_refused() -> None:
    request = StepRequest(LlamaConfig(**CONFIG), CHIPS, Rows(pairs=7, length=128, rows=4))
    with pytest.raises(RuntimeError, match="batches of 32 pairs on 4 chips, not of 7"):
        trace_programs(request)
