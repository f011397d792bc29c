"""Tiny models of the families of 2025 and 2026, by transformers' model types."""

from typing import Any

import torch
from decoders import PAD
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trl_tpu.modeling.head_spec import ONE_REWARD
from trl_tpu.modeling.heads import auto_class_of

BASE: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_labels": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0},
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1},
    **{"shared_expert_intermediate_size": 16, "num_local_experts": 4, "topk_group": 1, "n_shared_experts": 1},
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"num_key_value_heads": 4}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 16},
}
NEMOTRON = {
    **{"layers_block_type": ["mamba", "moe", "mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8},
    **{"ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "moe_shared_expert_intermediate_size": 16},
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
#: Families with recurrent layers and exact packed rows.
HYBRIDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5_text", "olmo_hybrid"), DELTA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), DELTA | EXPERTS),
    "kimi_linear": LATENT
    | {"layer_types": DELTA["layer_types"][-2:], "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 4}
    | {"num_experts_per_token": 2, "moe_intermediate_size": 16, "head_dim": None, "num_hidden_layers": 2},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "mamba", "mamba", "attention"], "shared_intermediate_size": 16}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bamba": MAMBA | {"attn_layer_indices": [3]},
    "nemotron_h": NEMOTRON | EXPERTS,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 2},
        **{"chunk_size": 16, "head_dim": None},
    },
    "bailing_hybrid": EXPERTS
    | LATENT
    | {"layer_group_size": 2, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
}
#: Other families that have no classifier in transformers 5.23.
DECODERS: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 2},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24, "global_head_dim": 8},
    },
    "gemma3n_text": {
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0},
        **{"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4},
    },
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 64},
    "glm4_moe": EXPERTS | {"first_k_dense_replace": 1},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    **dict.fromkeys(("granite", "cohere", "cohere2", "ernie4_5", "apertus", "internlm3"), {}),
    **dict.fromkeys(("minimax_m2", "exaone_moe", "olmoe", "mimo_v2_flash", "solar_open", "hy_v3"), EXPERTS),
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
#: Families with a classifier in transformers.
WITH_CLASS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mistral", "phi3", "gemma3_text", "starcoder2"), {"sliding_window": 24}),
    **dict.fromkeys(("ministral3", "smollm3", "glm4", "gemma", "diffllama"), {}),
    **dict.fromkeys(("olmo3", "exaone4"), WINDOWS),
    "gpt_oss": WINDOWS | EXPERTS,
    "deepseek_v3": EXPERTS | LATENT | {"first_k_dense_replace": 1, "head_dim": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": 24},
    "qwen2_moe": EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "enable_bias": False},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {},  # transformers' default plan names none of its modules
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"num_experts": 1, "num_experts_per_tok": 1, "use_mamba_kernels": False},
    },
    "zamba": {"n_mamba_heads": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"use_mamba_kernels": False, "layers_block_type": ["mamba", "hybrid"] * 2},
}


SETTINGS = HYBRIDS | DECODERS | WITH_CLASS | OTHERS
#: Multimodal types, and the types of their language models.
MULTIMODAL = {
    **{"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text", "llama4": "llama4_text"},
    **{"qwen3_5_moe": "qwen3_5_moe_text", "mistral3": "ministral3"},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1},
    **{"num_key_value_heads": 2, "head_dim": 8, "num_heads": 2, "image_size": 28, "patch_size": 14},
    **{"num_channels": 3, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": []},
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
}


def tiny_config(family: str, **changes: Any) -> Any:
    if family in MULTIMODAL:
        text = BASE | SETTINGS[MULTIMODAL[family]] | {"model_type": MULTIMODAL[family]} | changes
        return CONFIG_MAPPING[family](text_config=text, vision_config=VISION, pad_token_id=PAD)
    settings = BASE | SETTINGS[family] | changes
    if settings["head_dim"] is None:
        del settings["head_dim"]
    return CONFIG_MAPPING[family](**settings)


def tiny_classifier(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random reward model, with experts in plain torch."""
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    config._experts_implementation = "eager"
    return auto_class_of(config, ONE_REWARD).from_config(config, dtype=torch.float32)
