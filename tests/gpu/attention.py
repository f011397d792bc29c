"""Compare attention in packed rows, in every way that the device has, with dense masks over padded rows in float64.

Rewards and gradients of a packed batch may have twice the error that padded rows have in the same precision. A wrong
key changes them by a tenth or more.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import decoders
import torch

from trl_tpu.modeling import forward
from trl_tpu.modeling.attention import tree_layout, use_tree_masks
from trl_tpu.packing.pack import pack_unpadded
from trl_tpu.runtime import current

from . import IS_DRY, row

DEVICE, FLASH = current().device, tuple(f"flash_attention_{version}" for version in (2, 3, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Families by the rule of their masks: causal, sliding windows, soft caps, sinks; and the implementations to try.
WAYS = {
    "Llama": ("sdpa", "eager", *FLASH),
    "Mistral, sliding window": ("sdpa", *FLASH),
    "Gemma3, mixed windows": ("sdpa", *FLASH),
    "Gemma2, soft cap, mixed windows": ("eager",),
    "GPT-OSS, sinks": ("eager",),
}
ONE_EXPERT = {"num_local_experts": 1, "num_experts_per_tok": 1, "experts_implementation": "eager"}
decoders.FAMILIES["GPT-OSS, sinks"] = ("GptOss", ONE_EXPERT | {"sliding_window": 5})
SIZES = {"head_dim": 64, "hidden_size": 64, "max_position_embeddings": 1024}
TIMES = 1 if IS_DRY else 10
LONG = decoders.PROMPT * 3 * TIMES
#: also sequences of several blocks of a kernel
PAIRS = [*decoders.KNOWN_PAIRS, (LONG + [1, 2] * 8 * TIMES, LONG + [3] * 35), ([4, 5] * 15 * TIMES, [4, 6] * 65)]


def computed(model: Any, rewards: torch.Tensor) -> torch.Tensor:
    """Return the rewards and gradients as one vector in float64."""
    found = [rewards.detach(), *decoders.gradients(model, rewards.double()).values()]
    return torch.cat([tensor.cpu().double().flatten() for tensor in found])


@cache
def reference(family: str) -> tuple[Any, torch.Tensor]:
    """Return a model in float64 on the CPU, and what it computes for padded rows with dense masks."""
    exact = decoders.random_decoder(family, **SIZES, attn_implementation="eager")
    for parameter in exact.parameters():
        parameter.data /= 2  # less rounding in bfloat16
    with decoders.StayInFloat64():
        return exact, computed(exact, decoders.padded(exact, PAIRS))


def compare(family: str, name: str, dtype: torch.dtype) -> tuple[str, bool]:
    """Return the layout of packed rows, their error and that of padded rows, and whether both are as expected."""
    model: Any = decoders.random_decoder(family, dtype=torch.float32, **SIZES, attn_implementation=name).to(DEVICE)
    exact, expected = reference(family)
    model.load_state_dict(exact.state_dict())  # random numbers depend on the dtype
    with nullcontext() if dtype == torch.float32 else torch.autocast(DEVICE.type, dtype):
        padded = computed(model, decoders.padded(model, PAIRS))
        use_tree_masks(model)
        layout = tree_layout(model, DEVICE, dtype)
        parts = pack_unpadded(decoders.rows_of(PAIRS), attention_crossover_length=20, layout=layout)
        batches = (part.map_tensors(torch.from_numpy) for part in parts)
        packed = computed(model, decoders.packed(model, *batches, device=str(DEVICE)))
    ours, theirs = (((found - expected).norm() / expected.norm()).item() for found in (packed, padded))
    is_fast = layout.attention == "segments" or name == "eager" or dtype == torch.float32
    return f"{layout.attention}: error {ours:.1e} (padded {theirs:.1e})", ours <= 2 * theirs + 1e-6 and is_fast


if __name__ == "__main__":
    if IS_DRY:
        forward.few_kernels = lambda device: True  # the layouts of a GPU
    for family, names in WAYS.items():
        for name in names:
            for dtype in DTYPES[name in FLASH :]:
                check = f"{family}, {name}, {str(dtype).removeprefix('torch.')}"
                try:
                    row(check, *compare(family, name, dtype))
                except ImportError:
                    row(check, "not installed")
                except Exception as error:
                    row(check, f"{type(error).__name__}: {error}".splitlines()[0][:160], False)
