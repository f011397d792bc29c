"""A tiny random model of each of several families.

Every feature dimension is a multiple of 7 (after division over eight devices too), and no number of experts or words
is; nor do tests use a number or length of rows that is. So a program's arrays show what they are.
"""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_grouped": {"num_key_value_heads": 4},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 56},
    "llama_lora": {},
}


def family(
    name: str, tokenizer: PreTrainedTokenizerFast, outputs: int = 1, auto: Any = AutoModelForSequenceClassification
) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 328,
        "hidden_size": 56,
        "intermediate_size": 168,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 14,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "num_labels": outputs,
    }
    model_type = name.removesuffix("_lora").removesuffix("_grouped")
    config = AutoConfig.for_model(model_type, **(sizes | FAMILIES[name]))
    set_seed(0)
    return auto.from_config(config)
