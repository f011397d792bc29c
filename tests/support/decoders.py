"""Tiny random decoders of many families in float64, and their padded and packed rewards of pairs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from preference_rows import to_columns
from torch import nn
from torch.nn.functional import logsigmoid
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from trl_tpu.data.collate import ComparisonRule, sequences_of
from trl_tpu.data.trl_dict import DataCollatorForPreference
from trl_tpu.modeling.forward import rewards_of
from trl_tpu.packing.batch import Batch
from trl_tpu.packing.pack import Sequences, pack
from trl_tpu.packing.shapes import BatchShape, ShapePlan

PAD = 0
VOCAB = 32
TINY: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
TINY |= {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None, "num_labels": 1}
LAYERS = ["sliding_attention", "full_attention"]
MIXED = {"sliding_window": 3, "layer_types": LAYERS, "query_pre_attn_scalar": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED["original_max_position_embeddings"] = 16
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, scaled RoPE": ("Llama", {"rope_parameters": SCALED}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, mixed windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "layer_types": LAYERS}),
    "Qwen3": ("Qwen3", {}),
    "Mistral, sliding window": ("Mistral", {"sliding_window": 4}),
    "Gemma2, soft cap, mixed windows": (
        "Gemma2",
        MIXED | {"attn_logit_softcapping": 0.2, "attn_implementation": "eager"},
    ),
    "Gemma3, mixed windows": ("Gemma3Text", MIXED),
    "Phi-3, sliding window": ("Phi3", {"sliding_window": 5}),
    "OLMo2": ("Olmo2", {}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "GPT-2, learned positions": ("GPT2", {"n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS | {"experts_implementation": "eager", "decoder_sparse_step": 1}),
}
PROMPT = [5, 6, 7, 8, 9, 10, 11]
KNOWN_PAIRS = [
    (PROMPT + [1, 2, 3, 4], PROMPT + [4, 3]),  # two tails
    (PROMPT + [1, 2, 12], PROMPT + [13]),  # another pair of that prompt
    (PROMPT, PROMPT + [14, 15, 16]),  # one is a prefix of the other
    ([17, 18, 19], [17, 18, 19]),  # identical
    ([20], [21]),  # single tokens
    ([22] * 9, [23] * 11),  # nothing shared
    ([24, PAD, 25, PAD, PAD], [24, PAD, PAD]),  # the pad token in the text
]
Pairs = Sequence[tuple[list[int], list[int]]]
# pairs of few distinct ids, to share prefixes by chance; pairs with a prompt; equal pairs; single tokens
_ids = st.integers(1, VOCAB - 1)
_dialogue = st.lists(st.integers(1, 3), min_size=1, max_size=12)
_prompt, _tail = st.lists(_ids, min_size=1, max_size=10), st.lists(_ids, max_size=6)
drawn_pair = st.one_of(
    st.tuples(_dialogue, _dialogue),
    st.builds(lambda prompt, one, other: (prompt + one, prompt + other), _prompt, _tail, _tail),
    _dialogue.map(lambda ids: (ids, ids)),
    st.tuples(_ids, _ids).map(lambda both: ([both[0]], [both[1]])),
)


def random_decoder(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """Return a random reward model with weights large enough that attention is far from uniform."""
    name, settings = FAMILIES[family]
    settings = {**TINY, **settings, **changes}
    implementation = settings.pop("attn_implementation", "sdpa")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    classes = transformers.AutoModelForSequenceClassification
    model = classes.from_config(config, attn_implementation=implementation, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def padded(model: nn.Module, pairs: Pairs) -> torch.Tensor:
    """Compute the rewards [P, 2] as TRL does."""
    batch = DataCollatorForPreference(PAD)([to_columns({"answers": pair}) for pair in pairs])
    device = next(model.parameters()).device
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.view(2, len(pairs)).T


def rows_of(pairs: Pairs, most: int | None = None) -> Sequences:
    rows = [to_columns({"answers": pair}) for pair in pairs]
    return sequences_of(rows, PAD, ComparisonRule().table(rows, most))


def in_rows(pairs: Pairs, *shapes: BatchShape) -> Batch[torch.Tensor]:
    """Pack pairs into one micro-batch of the first shape that holds them, with their expansion."""
    (rows,) = pack(rows_of(pairs), ShapePlan(shapes), expands=True)
    return rows.map_tensors(torch.from_numpy)


def packed(model: nn.Module, *batches: Batch[torch.Tensor], expand: bool = False, device: str = "cpu") -> torch.Tensor:
    """Compute the rewards [P, 2] of packed rows, with their expansion or without."""
    parts = []
    for rows in batches:
        moved = (rows if expand else replace(rows, expansion=None)).map_tensors(lambda tensor: tensor.to(device))
        parts.append(torch.where(moved.tokens_S > 0, rewards_of(model, moved)[0].squeeze(-1), 0.0))
    return torch.stack(parts).sum(0).view(-1, 2)


def gradients(model: nn.Module, rewards_P2: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss that depends on every reward."""
    chosen, rejected = rewards_P2.unbind(-1)
    loss = (-logsigmoid(chosen - rejected) + 0.1 * (chosen + rejected) ** 2).mean()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}


class StayInFloat64(TorchFunctionMode):
    """Keeps norms and routers in float64: their float32 computation would hide errors up to 1e-7."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensor = args[0] if args else None
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
            casts = (torch.Tensor.to, torch.Tensor.type)
            if function is torch.Tensor.float or (function in casts and torch.float32 in args[1:]):
                return tensor
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)
