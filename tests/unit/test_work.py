"""The formula for a step's operations counts what torch itself counts of real models, to the last multiplication."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu.modeling.model_shape import needed_flops, read_model
from trl_tpu.packing.shapes import PairLengths

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
DIALOGUES, LENGTH = 4, 16


def tiny(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, num_labels=1, pad_token_id=0, **SIZES | MODELS[model_type])
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    if model_type == "qwen3_moe":
        model.set_experts_implementation("eager")  # each expert multiplies the tokens that are routed to it
    return model


def counted_by_torch(model: Any) -> float:
    """Of a forward and backward over plain dialogues; without the angles of positions, which torch counts too."""
    ids = torch.randint(1, 64, (DIALOGUES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    by_module = counter.get_flop_counts().items()
    return counter.get_total_flops() - sum(sum(own.values()) for name, own in by_module if name.endswith("rotary_emb"))


def by_formula(model: Any) -> float:
    """The same by formula, but for eager attention, which computes every query with every key."""
    shape, pairs = read_model(model), PairLengths.of([(0, LENGTH, LENGTH)] * (DIALOGUES // 2))
    attended = sum(DIALOGUES * LENGTH**2 - pairs.attended(window) for window in shape.windows)
    return needed_flops(shape, pairs) + 3 * 2 * shape.attention * attended


@pytest.mark.parametrize("model_type", MODELS)
def test_forward_and_backward_are_what_torch_counts(model_type: str) -> None:
    model = tiny(model_type)
    assert by_formula(model) == counted_by_torch(model)


def test_frozen_weights_pass_gradients_on_and_adapters_get_them() -> None:
    adapters = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(tiny("llama"), adapters)
    model.enable_input_require_grads()  # what the trainer does too: gradients pass through the first layer
    assert by_formula(model) == counted_by_torch(model)
    shape = read_model(model)
    assert shape.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=3),
    st.none() | st.integers(1, 9),
)
def test_a_common_prefix_is_computed_once(sizes: list[tuple[int, int, int]], window: int | None) -> None:
    pairs = PairLengths.of(sizes)
    seen = 0
    for prefix, chosen, rejected in sizes:
        for tail in (chosen, rejected):
            at = np.arange(prefix + tail)
            mask = at[:, None] >= at
            if window is not None:
                mask &= at[:, None] - at < window
            seen += int(mask[prefix:].sum())
        seen += int(mask[:prefix].sum())
    assert pairs.attended(window) == seen
    assert pairs.tokens == sum(map(sum, sizes))
