"""The real TPU compiler takes the trainer's programs: chips of three generations, one to 256 of them."""

from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig

from trl_tpu.preflight.compile import compile_for
from trl_tpu.preflight.trace import Rows, StepRequest, TracedProgram, trace_step

LENGTH = 256
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])


EXPANDED = {"packed_attention": "expanded"}
PADDED = {"packing": "false"}
CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("v5e:2x2", 1, "train", EXPANDED),
    ("v6e:2x2", 1, "train", PADDED | {"adapters": True}),
    ("v5p:2x2x2", 1, "evaluate", {}),
    ("v5e:2x4", 8, "train", EXPANDED | {"adapters": True}),
    ("v6e:2x4", 8, "train", EXPANDED | {"mesh": "fsdp=4,tensor=2", "remat": "dots"}),
    ("v5p:2x2x2", 8, "train", EXPANDED | {"scan_layers": True}),
    ("v6e:2x4", 8, "evaluate", EXPANDED),
    ("v5e:2x4", 8, "evaluate", PADDED),
    ("v5e:16x16", 256, "train", EXPANDED | {"mesh": "data=4,fsdp=64"}),
    ("v6e:16x16", 256, "train", PADDED),
    ("v5p:4x8x8", 256, "evaluate", EXPANDED),
]


@cache
def traced(chips: int, what: str, settings: frozenset[tuple[str, Any]]) -> TracedProgram:
    arguments = dict(settings)
    adapters = arguments.pop("adapters", False)
    parts = chips // (2 if "tensor=2" in arguments.get("mesh", "") else 1)
    per_device = {f"per_device_{each}_batch_size": 1 for each in ("train", "eval")}
    pairs = chips
    rows = Rows(pairs, LENGTH, None if arguments.get("packing") == "false" else parts)
    peft = lora() if adapters else None
    return trace_step(StepRequest(LlamaConfig(**CONFIG), chips, rows, per_device | arguments, peft, what))


@pytest.mark.parametrize(
    ("topology", "chips", "what", "settings"),
    CASES,
    ids=[f"{topology}, {chips} chips, {what}, {settings}" for topology, chips, what, settings in CASES],
)
def test_a_program_of_the_trainer_compiles(topology: str, chips: int, what: str, settings: dict[str, Any]) -> None:
    program = traced(chips, what, frozenset(settings.items()))
    compiled = compile_for(program, topology)
    held = program.bytes_per_chip()
    # the compiler pads small arrays to tiles, so that it may need more; but never the whole of what is split
    state = held["weight"] + held.get("optimizer", 0)
    assert state <= compiled.arguments <= 1.1 * sum(held.values()) + 4096 * len(program.arguments)
    donated = sum(each.bytes_per_chip for each in program.arguments if each.donated)
    if what == "train":
        trained = [each for each in program.arguments if each.kind == "optimizer"]
        assert trained and all(each.donated for each in trained)
        assert compiled.aliased >= 0.99 * donated  # a scalar may stay behind
    else:
        assert donated == 0 and "optimizer" not in held
    assert compiled.flops > 0 and compiled.bytes_accessed > 0 and compiled.temporary > 0
    assert bool(compiled.collectives) == (chips > 1)
    assert {each.kind for each in compiled.collectives} <= {
        "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    }  # fmt: skip


def test_what_cannot_be_compiled_says_so() -> None:
    program = traced(8, "evaluate", frozenset(PADDED.items()))
    with pytest.raises(RuntimeError, match="8 chips, but v5e:2x2 has 4"):
        compile_for(program, "v5e:2x2")
