"""Checkpoints for tests of export, made without a trainer: a sharded state as several devices would write it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForSequenceClassification,
    set_seed,
)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_labels": 1,
    "pad_token_id": 0,
}


def llama(**config: Any) -> PreTrainedModel:
    return _random(LlamaForSequenceClassification(LlamaConfig(**(SIZES | config))))


def experts() -> PreTrainedModel:
    """Experts that transformers holds in one tensor and saves one by one."""
    config = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **SIZES)
    return _random(Qwen3MoeForSequenceClassification(config))


def tied() -> PreTrainedModel:
    """A model with one embedding under three names."""
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = BartConfig(vocab_size=64, d_model=16, num_labels=1, eos_token_id=2, **heads, **layers)
    return _random(BartForSequenceClassification(config))


def _random(model: PreTrainedModel) -> PreTrainedModel:
    set_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def write_state(folder: Path, tensors: Mapping[str, torch.Tensor], parts: int = 2) -> None:
    """Write ``model.{name}`` cut along the first dimension, a file each part, and optimizer state beside it."""
    folder.mkdir(parents=True)
    for part in range(parts):
        held, places = {}, {}
        for name, tensor in tensors.items():
            if tensor.dim() == 0 or tensor.shape[0] < parts:  # whole on the first device
                if part:
                    continue
                start, piece = 0, tensor
            else:
                size = -(-tensor.shape[0] // parts)
                start, piece = part * size, tensor[part * size : (part + 1) * size]
            held[f"model.{name}"] = held[f"optimizer.{name}.exp_avg"] = piece.detach().contiguous().clone()
            held[f"optimizer.{name}.exp_avg"] = torch.zeros_like(piece)
            offsets = [start, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            places[f"model.{name}"] = places[f"optimizer.{name}.exp_avg"] = {"saved_offsets": offsets}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        save_file(held, folder / f"host-{part:05d}-device-000.safetensors", metadata)


def checkpoint_of(model: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint of several hosts: its weights are in the state alone; tied ones once, under their first name."""
    model.save_pretrained(folder, state_dict={})
    tensors = model.state_dict(keep_vars=True)
    once: dict[int, str] = {}
    for name, tensor in tensors.items():
        once.setdefault(id(tensor), name)
    write_state(folder / "state", {name: tensors[name] for name in once.values()})
    (folder / "trainer_state.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    return folder


def same_weights(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Bit by bit and of the same dtypes, under the same names."""

    def same(one: torch.Tensor, two: torch.Tensor) -> bool:
        return one.dtype == two.dtype and one.equal(two)

    return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
