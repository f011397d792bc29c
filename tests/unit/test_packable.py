"""Packing is exact for every model type accepted as packable; other models are detected and left unchanged."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import decoders
import peft
import pytest
import torch
import transformers
from decoders import PAD
from torch import nn
from transformers import PreTrainedModel

from trl_tpu.data.collate import BatchCollator
from trl_tpu.modeling.forward import PackingImpossible, rewards_of
from trl_tpu.modeling.packability import make_packable
from trl_tpu.packing.pack import pack_unpadded, pad
from trl_tpu.packing.planned import pack
from trl_tpu.packing.shapes import RowPlan, RowShape

TINY: dict[str, Any] = decoders.TINY | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TINY["max_position_embeddings"] = 1024
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48}
RECURRENT = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
RECURRENT |= {"num_experts": 1, "num_experts_per_tok": 1, "use_mamba_kernels": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma": ("Gemma", {}),
    "OLMo3": ("Olmo3", WINDOWS),
    "EXAONE 4": ("Exaone4", WINDOWS),
    "SmolLM3, layers without positions": ("SmolLM3", {}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 48}),
    "GPT-OSS, attention sinks": ("GptOss", WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Starcoder2": ("Starcoder2", {"sliding_window": 48}),
    "OPT": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "differential attention": ("DiffLlama", {}),
}
# packed rewards differ from padded ones in rows that are long enough, or attention uses custom code
NOT_EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "ALiBi": ("Bloom", {}),
    "ALiBi, Falcon": ("Falcon", {"alibi": True}),
    "windows of columns": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 256},
    ),
    "both ways": ("Gemma3Text", {"use_bidirectional_attention": True, **WINDOWS, "sliding_window": 512}),
    "recurrent": ("Jamba", RECURRENT),
    "encoder": ("Bert", {}),
    "encoder, ModernBERT": ("ModernBert", {}),
    "encoder-decoder": ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}),
}


def tiny_model(family: str, tables: dict[str, Any], **changes: Any) -> PreTrainedModel:
    """Return a model with transformers' initial weights, whose attention is nearly uniform."""
    name, settings = tables[family]
    settings = TINY | settings | changes
    if name in ("Bloom", "Falcon", "GPTNeo"):  # their configs have attributes with setters that raise
        settings = {key: value for key, value in settings.items() if key not in ("head_dim", "num_key_value_heads")}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def rejected_unless_exact(family: str) -> Any:
    return nullcontext() if family in EXACT else pytest.raises(PackingImpossible)


def long_pairs() -> list[dict[str, Any]]:
    """Return pairs far longer than those of the trial before packing, and longer than any window above."""
    torch.manual_seed(1)
    ids = torch.randint(1, TINY["vocab_size"], (800,)).tolist()
    prompt = ids[:200]
    tails = (ids[200:350], ids[350:470]), (ids[470:500], ids[500:560])
    return [{"answers": [prompt + one, prompt + other]} for one, other in tails]


@pytest.mark.parametrize("family", EXACT)
def test_packed_families_stay_exact_on_pairs_longer_than_the_trial(family: str) -> None:
    model = tiny_model(family, EXACT).eval()
    make_packable(model, PAD)
    for parameter in model.parameters():  # makes attention far from uniform
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    plan, rewards = RowPlan((RowShape(1, 800),)), []
    for pack_rows in (pad, partial(pack, plan=plan), pack_unpadded):
        (batch,) = BatchCollator(pack_rows, PAD)(long_pairs()).parts
        with torch.no_grad():
            rewards.append(rewards_of(model, batch)[0])
    for in_packed_rows in rewards[1:]:
        torch.testing.assert_close(in_packed_rows, rewards[0], rtol=1e-5, atol=1e-5)  # rewards are about 1, in float32


@pytest.mark.parametrize("family", NOT_EXACT)
def test_families_with_inexact_packing_are_rejected(family: str) -> None:
    with pytest.raises(PackingImpossible, match=NOT_EXACT[family][0]):
        make_packable(tiny_model(family, NOT_EXACT), PAD)


@pytest.mark.parametrize("pad_token_id", [0, 2, 9, 12, 24, 63])
def test_trial_works_with_any_pad_token(pad_token_id: int) -> None:
    """Sequences of the trial must not end in the pad token: they would be scored before it."""
    make_packable(tiny_model("Mixtral", EXACT, pad_token_id=pad_token_id), pad_token_id)


def test_bfloat16_weights_too_coarse_for_the_trial_are_not_packed() -> None:
    """With small weights, bfloat16 rounding exceeds the effect of a state or a position."""
    with pytest.raises(PackingImpossible, match="bfloat16"):
        make_packable(tiny_model("Mixtral", EXACT).bfloat16(), PAD)


@pytest.mark.parametrize("family", ["Mixtral", "recurrent"])
@pytest.mark.parametrize("training", [True, False])
def test_trial_changes_neither_model_nor_random_state(family: str, training: bool) -> None:
    model = tiny_model(family, EXACT | NOT_EXACT).train(training)
    before, attention = copy.deepcopy(model.state_dict()), model.config._attn_implementation
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with rejected_unless_exact(family):
        make_packable(model, PAD)
    assert (model.config._attn_implementation == attention) == (family in NOT_EXACT)
    assert torch.equal(torch.rand(1), expected)
    assert {module.training for module in model.modules()} == {training}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["Mixtral", "recurrent"])
def test_trial_includes_the_adapters(family: str) -> None:
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(family, EXACT | NOT_EXACT), lora)
    with rejected_unless_exact(family):
        make_packable(model, PAD)


class OwnMasks(transformers.LlamaForSequenceClassification):
    """Like some remote code: takes position ids and builds its own mask."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        states = self.model.embed_tokens(input_ids).cumsum(dim=1)
        return self.score(states)


class Llama(transformers.LlamaForSequenceClassification):
    """Like some remote code: transformers' class under another name."""


def test_remote_code_is_packed_only_with_transformers_forwards() -> None:
    make_packable(Llama(transformers.LlamaConfig(**TINY)), PAD)
    with pytest.raises(PackingImpossible, match="OwnMasks"):
        make_packable(OwnMasks(transformers.LlamaConfig(**TINY)), PAD)
    with pytest.raises(PackingImpossible, match="Linear"):
        make_packable(nn.Linear(2, 1), PAD)
