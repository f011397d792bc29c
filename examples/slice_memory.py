"""Print the memory per chip that training states need, by mesh: `python examples/slice_memory.py`.

Models have no weights, and the sharding plan is the trainer's own. The script counts weights in float32 (4 bytes per
parameter), gradients (4) and Adam's two moments (8) of trained parameters, and the layer inputs that activation
checkpointing keeps, in float32. Computing a layer needs more memory: leave a fifth of a chip free.
"""

from math import prod
from typing import Any

from transformers import AutoConfig

from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.parallel.mesh import parse_mesh
from trl_tpu.parallel.shard import plan_model

# the sizes that the models' own configs have
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    "Qwen2.5-1.5B": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936},
    "Llama-3.1-8B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "Qwen2.5-32B": {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064},
    "Llama-3.1-70B": {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                      "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip

# chips, and GB on each (https://cloud.google.com/tpu/docs/v5e, .../v6e, .../v5p); v5p counts cores, two on a chip
SLICES = {
    "v5e-8": (8, 16),
    "v6e-8": (8, 32),
    "v6e-16": (16, 32),
    "v5p-16": (8, 95),
    "v5p-128": (64, 95),
    "2 x v5p-128": (128, 95),
}

# model, slice, mesh, and the share of the weights that is trained
CHOICES = [
    ("Qwen2.5-0.5B", "v5e-8", "fsdp=-1", 1.0),
    ("Qwen2.5-1.5B", "v5e-8", "fsdp=-1", 1.0),
    ("Llama-3.1-8B", "v5e-8", "fsdp=-1", 0.01),
    ("Llama-3.1-8B", "v6e-8", "fsdp=-1", 1.0),
    ("Llama-3.1-8B", "v5p-16", "fsdp=-1", 1.0),
    ("Qwen2.5-32B", "v6e-16", "fsdp=-1", 0.01),
    ("Qwen2.5-32B", "v5p-16", "fsdp=-1", 1.0),
    ("Qwen2.5-32B", "v5p-128", "fsdp=-1", 1.0),
    ("Llama-3.1-70B", "v5p-16", "fsdp=-1", 0.01),
    ("Llama-3.1-70B", "v5p-128", "fsdp=-1", 1.0),
    ("Llama-3.1-70B", "v5p-128", "fsdp=-1,tensor=4", 1.0),
    ("Llama-3.1-70B", "2 x v5p-128", "slices=2,fsdp=-1", 1.0),
    ("Llama-3.1-70B", "2 x v5p-128", "slices=2,fsdp=-1,tensor=4", 1.0),
]

TOKENS_PER_PART = 8192  # tokens of one part of the batch after packing: about four pairs of 2,048 tokens


def gigabytes_per_chip(model: Any, mesh_spec: str, chips: int, trained: float) -> tuple[float, float]:
    """Return GB per chip of weights, gradients and optimizer state, and of the layer inputs kept for the backward.

    Raises:
        UserError: The mesh does not fit the chips, or the model's heads.
    """
    mesh = parse_mesh(mesh_spec, chips)
    plan = plan_model(model, mesh)
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    numbers = sum(prod(shape) // plan.place(name, shape).parts(mesh) for name, shape in weights.items())
    inputs = TOKENS_PER_PART * model.config.hidden_size * model.config.num_hidden_layers
    return (4 + 12 * trained) * numbers / 1e9, 4 * inputs / 1e9


def table() -> list[tuple[str, str, str, float, float, float, int]]:
    """Model, slice, mesh, share trained, GB of state, GB of layer inputs, GB there are."""
    models = {name: model_without_weights(AutoConfig.for_model(**MODELS[name]), "float32") for name in MODELS}
    rows = []
    for name, slice_name, mesh, trained in CHOICES:
        chips, memory = SLICES[slice_name]
        rows.append((name, slice_name, mesh, trained, *gigabytes_per_chip(models[name], mesh, chips, trained), memory))
    return rows


def main() -> None:
    print("| model | trained | slice | `mesh` | state, GB per chip | layer inputs | memory of a chip |")
    print("|---|---|---|---|---|---|---|")
    for name, slice_name, mesh, trained, state, inputs, memory in table():
        kind = "all" if trained == 1 else "LoRA"
        print(f"| {name} | {kind} | {slice_name} | `{mesh}` | {state:.1f} | {inputs:.1f} | {memory} |")


if __name__ == "__main__":
    main()
