"""Programs of the trainer, traced for TPUs: tiny Llamas under the settings that the tests name."""

from typing import Any

from transformers import LlamaConfig

from trl_tpu.preflight.trace import Rows, StepRequest, TracedProgram, trace_step

LENGTH = 256
EXPANDED = {"packed_attention": "expanded"}
PADDED = {"packing": "false"}
ADAPTERS = {"adapters": True}
LARGE = {"hidden_size": 1024, "intermediate_size": 16384, "num_attention_heads": 8, "num_key_value_heads": 8}
SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "packed": (1, "train", EXPANDED),
    "long rows": (1, "train", EXPANDED | {"length": 4096}),
    "padded": (1, "train", PADDED | {"remat": "none"}),
    "adapters, tensor parallel": (8, "train", EXPANDED | ADAPTERS | {"mesh": "fsdp=4,tensor=2", "remat": "dots"}),
    "layers as a loop": (8, "train", EXPANDED | {"scan_layers": True}),
    "large weights": (16, "train", EXPANDED | {"scan_layers": True, "length": 2048, "sizes": LARGE}),
    "large weights, many chips": (64, "train", EXPANDED | {"scan_layers": True, "length": 2048, "sizes": LARGE}),
    "large weights, many chips, one by one": (64, "train", EXPANDED | {"length": 2048, "sizes": LARGE}),
    "loop, tensor parallel": (8, "train", EXPANDED | {"scan_layers": True, "mesh": "fsdp=4,tensor=2"}),
    "evaluation": (8, "evaluate", EXPANDED),
    "packed, two axes": (256, "train", EXPANDED | {"mesh": "data=4,fsdp=64"}),
    "padded, adapters": (256, "train", PADDED | ADAPTERS),
    "padded, evaluation": (256, "evaluate", PADDED),
}


def config(layers: int = 1, **sizes: int) -> LlamaConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    usual = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    return LlamaConfig(num_labels=1, **heads | usual | sizes)


def trace(name: str) -> TracedProgram:
    chips, what, settings = SETTINGS[name]
    arguments: dict[str, Any] = {f"per_device_{each}_batch_size": 1 for each in ("train", "eval")} | settings
    peft = lora() if arguments.pop("adapters", False) else None
    pairs = chips // (2 if "tensor=2" in arguments.get("mesh", "") else 1)
    rows = Rows(pairs, arguments.pop("length", LENGTH), None if settings.get("packing") == "false" else pairs)
    model = config(layers=2 if "scan_layers" in settings else 1, **arguments.pop("sizes", {}))
    return trace_step(StepRequest(model, chips, rows, arguments, peft, what))  # type: ignore[arg-type]


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])
