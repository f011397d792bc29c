"""Programs of the trainer, traced for TPUs: tiny Llamas under the settings that the tests name."""

from typing import Any

from transformers import LlamaConfig

from trl_tpu.parallel.mesh import parse_mesh
from trl_tpu.plan.compile import TracedProgram
from trl_tpu.plan.trace import StepRequest, trace_step

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
"""How many chips each takes, and arguments of the trainer; "length" is of its rows."""


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
    from peft import LoraConfig

    return LoraConfig(r=8, task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])
