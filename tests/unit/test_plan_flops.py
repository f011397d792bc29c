"""The formula for a step's operations counts what torch itself counts of real models, to the last multiplication."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from planned import workload
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu.modeling.model_shape import read_model
from trl_tpu.modeling.work import work_of
from trl_tpu.packing.lengths import PairLengths
from trl_tpu.parallel.chips import parse_topology
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.plan.needs import computed_flops, needed_flops
from trl_tpu.plan.workload import Layout

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


def layout_of(model: Any, pair: tuple[int, int, int], pairs: int = 1, remat: str = "none") -> Layout:
    """In padded rows, which such pairs fill if they share nothing and are equally long."""
    planned = workload(model, PairLengths.of([pair]), packing=False)
    return Layout(planned, parse_topology("v5e:1x1"), MeshShape(), remat, pairs)


def attention_of(model: Any, pair: tuple[int, int, int], pairs: int = 1) -> float:
    layout = layout_of(model, pair, pairs)
    return work_of(layout.workload.model, layout.lengths).attention


def by_formula(model: Any, remat: str = "none") -> float:
    """The same. Eager attention computes every query with every key."""
    layout, shape = layout_of(model, (0, LENGTH, LENGTH), DIALOGUES // 2, remat), read_model(model)
    attention = attention_of(model, (0, LENGTH, LENGTH), DIALOGUES // 2)
    all_with_all = 2 * shape.heads * sum(shape.head_dims) * DIALOGUES * LENGTH**2 * shape.layers
    passes = 4 if remat == "full" else 3
    return computed_flops(layout) + passes * (all_with_all - attention)


@pytest.mark.parametrize("model_type", MODELS)
def test_forward_and_backward_are_what_torch_counts(model_type: str) -> None:
    model = tiny(model_type)
    assert by_formula(model) == counted_by_torch(model)


@pytest.mark.parametrize("model_type", MODELS)
def test_full_remat_is_one_more_forward_of_the_layers(model_type: str) -> None:
    model = tiny(model_type)
    model.gradient_checkpointing_enable({"use_reentrant": True})  # which computes all of a layer again
    model.train()
    assert by_formula(model, "full") == counted_by_torch(model)


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
def test_a_common_prefix_is_computed_once_and_attention_is_what_masks_allow(
    sizes: list[tuple[int, int, int]], window: int | None
) -> None:
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


def test_pairs_are_drawn_alike_each_time() -> None:
    pairs = PairLengths.of([(10, 3, 4), (20, 5, 6)])
    assert set(pairs.drawn(50).sizes_P.tolist()) == {17, 31}
    assert pairs.drawn(50).tokens == pairs.drawn(50).tokens
    assert PairLengths.of_size(1001).drawn(3).sizes_P.tolist() == [1001] * 3
    assert pairs.longest_P.tolist() == [14, 26]


def test_a_windowed_layer_costs_less_only_where_texts_are_longer_than_the_window() -> None:
    model = tiny("gemma3_text")
    shape, short, long = read_model(model), PairLengths.of([(0, 4, 4)]), PairLengths.of([(0, 40, 40)])
    assert shape.windows == (4, None, 4)
    one_layer = 2 * shape.heads * sum(shape.head_dims)
    assert attention_of(model, (0, 4, 4)) == 3 * one_layer * short.attended()
    assert attention_of(model, (0, 40, 40)) == one_layer * (long.attended() + 2 * long.attended(4))


def test_padding_is_computed_but_not_needed() -> None:
    layout = layout_of(tiny("llama"), (8, 16, 8), pairs=2)
    assert computed_flops(layout) == needed_flops(layout) * (2 * 2 * 24) / (2 * 32)


def test_experts_count_by_those_that_a_token_is_routed_to() -> None:
    shape = read_model(tiny("qwen3_moe"))
    experts = [weight for weight in shape.weights if weight.kind == "experts"]
    assert len(experts) == 2 * shape.layers
    assert {weight.used for weight in experts} == {0.5}
