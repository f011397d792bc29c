"""Packed rows, with masks or expanded, give the rewards and gradients of the padded forward."""

from functools import cache, partial
from typing import Any

import peft
import pytest
import torch
from decoders import (
    FAMILIES,
    KNOWN_PAIRS,
    PAD,
    PROMPT,
    Pairs,
    StayInFloat64,
    drawn_pair,
    gradients,
    in_rows,
    packed,
    padded,
    random_decoder,
    rows_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, GptOssConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_tpu.modeling import forward
from trl_tpu.modeling.attention import flash_in_segments, tree_layout, use_tree_masks
from trl_tpu.modeling.packability import PROVEN_TYPES, check_packing_is_exact
from trl_tpu.modeling.static_shapes import ExpansionImpossible, use_expanded_attention, window_of
from trl_tpu.packing.pack import TreeLayout, pack, pack_unpadded
from trl_tpu.packing.shapes import BatchShape, ShapePlan
from trl_tpu.runtime.varlen import varlen_attention

EAGER = {"Llama, eager": "Llama", "Mistral, sliding window, eager": "Mistral, sliding window"}
ALL = [*FAMILIES, *EAGER]
TRAINED = {"LoRA": "Qwen3", "recomputed layers": "GPT-NeoX"}  # their backward runs outside the packed forward


def tiny_model(name: str, expands: bool = False, **changes: Any) -> Any:
    family = (EAGER | TRAINED).get(name, name)
    model: Any = random_decoder(family, **changes | {"attn_implementation": "eager"} if name in EAGER else changes)
    (use_expanded_attention if expands else use_tree_masks)(model)
    if name == "recomputed layers":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if name == "LoRA":
        torch.manual_seed(1)
        targets = ["q_proj", "down_proj"]
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    return model


model_of = cache(tiny_model)


LONG = 32  # tokens of the largest pair in these tests
PLANS = {
    "one micro-batch": ShapePlan((BatchShape(2, 160),)),
    "micro-batches": ShapePlan((BatchShape(1, 12), BatchShape(2, LONG)), (BatchShape(1, LONG), BatchShape(2, 8))),
    "tight, one by one": None,
    "tight, segments": None,
    "tight, rows": None,
    "expanded": ShapePlan((BatchShape(2, 40), BatchShape(2, 64), BatchShape(1, 180))),
    "expanded, one row": ShapePlan((BatchShape(1, 180),)),
    "expanded, micro-batches": ShapePlan((BatchShape(1, LONG),), (BatchShape(2, LONG),)),
}


def layouts_of(name: str) -> list[str]:
    return [layout for layout in PLANS if "expanded" not in layout or name not in EAGER]


def packed_in(layout: str, name: str, pairs: Pairs) -> torch.Tensor:
    """Return the rewards [P, 2] of all micro-batches."""
    rows, plan, expands = rows_of(pairs), PLANS[layout], "expanded" in layout
    trees: Any = TreeLayout(layout.removeprefix("tight, "))  # type: ignore[arg-type]
    some = (
        pack(rows, plan, expands=expands) if plan else pack_unpadded(rows, attention_crossover_length=20, layout=trees)
    )
    parts = (each.map_tensors(torch.from_numpy) for each in some)
    return packed(model_of(name, expands), *parts, expand=expands)


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def assert_all_layouts_are_padded_rows(name: str, pairs: Pairs) -> None:
    with StayInFloat64():
        expected = padded(model_of(name), pairs)
        theirs = gradients(model_of(name), expected)
        assert theirs and expected.dtype == torch.float64
        for layout in layouts_of(name):
            rewards = packed_in(layout, name, pairs)
            assert_equal(rewards, expected)
            assert_equal(gradients(model_of(name, "expanded" in layout), rewards), theirs)


@pytest.mark.parametrize("name", [*ALL, *TRAINED])
def test_rewards_and_gradients_equal_the_padded_forward(name: str) -> None:
    assert_all_layouts_are_padded_rows(name, KNOWN_PAIRS)


@pytest.mark.parametrize("family", ALL)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=st.lists(drawn_pair, min_size=1, max_size=5))
def test_rewards_and_gradients_of_random_pairs_equal_the_padded_forward(family: str, pairs: list[Any]) -> None:
    assert_all_layouts_are_padded_rows(family, pairs)


@pytest.mark.parametrize("family", ALL)
def test_trial_finds_every_family_exact_in_float32(family: str) -> None:
    model = tiny_model(family, vocab_size=64).float()
    check_packing_is_exact(model, PAD, True, model.device, model.dtype)


def test_proven_types_equal_the_families_tested_here() -> None:
    assert {model_of(family).config.get_text_config().model_type for family in ALL} == PROVEN_TYPES


@pytest.mark.parametrize("family", ["Llama", "Mistral, sliding window", "Gemma2, soft cap, mixed windows"])
def test_expanding_model_reads_other_batches_unchanged(family: str) -> None:
    """Other batches are padded ones and packed rows without an expansion."""
    expanded, rows = model_of(family, True), in_rows(KNOWN_PAIRS, BatchShape(2, 64))
    with StayInFloat64():
        expected = padded(model_of(family), KNOWN_PAIRS)
        theirs = gradients(model_of(family), expected)
        for rewards in (padded(expanded, KNOWN_PAIRS), packed(expanded, rows)):
            assert_equal(rewards, expected)
            assert_equal(gradients(expanded, rewards), theirs)


def test_no_tensor_outside_the_kernel_is_quadratic_in_row_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watch(StayInFloat64):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs)
            sizes.extend([result.numel()] if isinstance(result, torch.Tensor) else [])
            return result

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        return q * k.mean() + v.mean()

    monkeypatch.setattr("trl_tpu.runtime.native.Runtime.segment_attention", staticmethod(kernel))
    rows = in_rows([(PROMPT * 8 + [1], PROMPT * 8 + [2])], BatchShape(1, 512))
    with Watch():
        packed(model_of("Mistral, sliding window", True), rows, expand=True).sum().backward()
    assert 512 * 32 <= max(sizes) < 512 * 512 / 2


@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("Llama", torch.bfloat16, "segments"),
        ("Llama, eager", torch.bfloat16, "rows"),
        ("Llama", torch.float32, "rows"),
    ],
)
def test_gpu_attends_without_masks_where_its_kernel_can(
    name: str, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tree_layout(model_of(name), torch.device("cpu"), dtype).attention == "one by one"
    monkeypatch.setattr(forward, "few_kernels", lambda _: True)
    assert tree_layout(model_of(name), torch.device("cpu"), dtype).attention == layout


def test_kernel_of_a_gpu_takes_segments_and_has_gradients() -> None:
    """Shapes only: its numbers, and that it aligns masks to the last key, show on a GPU: see `varlen_error`."""
    q, k = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((9, 4, 64), (20, 2, 64)))
    starts = torch.empty(3, device="meta", dtype=torch.int32)
    output = varlen_attention((q.requires_grad_(), k.requires_grad_(), k), (starts, starts, 6, 12), 0.1, window=5)
    output.sum().backward()
    assert output.shape == q.shape and k.grad is not None and k.grad.shape == k.shape


def test_flash_attention_is_compiled_without_the_layers_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number would be part of the program: each layer would have its own."""

    def flash(layer: Any, query: Any, **_: Any) -> Any:
        return query * (layer.config._attn_implementation == "flash_attention_2"), hasattr(layer, "layer_idx")

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash)
    attend = torch.compile(partial(flash_in_segments, "flash_attention_2"), backend="eager", fullgraph=True)
    output, has_number = attend(model_of("Llama").model.layers[0].self_attn, torch.ones(2))
    assert output.tolist() == [1, 1] and not has_number


# ---- rejected models


def prefix_rule(row: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 3


def chunks(size: int) -> Any:
    return lambda row, head, query, key: (key <= query) & (key // size == query // size)


MASKS = [
    (causal_mask_function, None),
    (sliding_window_causal_mask_function(5), 5),
    (sliding_window_causal_mask_function(1), 1),
    (sliding_window_causal_mask_function(12), None),  # as wide as the rows: no window
    (sliding_window_causal_mask_function(11), 11),
    (sliding_window_causal_mask_function(4000), None),
    (bidirectional_mask_function, ExpansionImpossible),
    (or_masks(causal_mask_function, prefix_rule), ExpansionImpossible),
    (lambda row, head, query, key: key < query, ExpansionImpossible),  # a token does not attend to itself
    (chunked_causal_mask_function(5, torch.zeros(2)), ExpansionImpossible),  # chunks begin with the text
    *[(chunks(size), ExpansionImpossible) for size in range(2, 12)],
]


@pytest.mark.parametrize(("rule", "window"), MASKS)
def test_only_causal_mask_functions_are_expanded(rule: Any, window: Any) -> None:
    if window is ExpansionImpossible:
        with pytest.raises(window):
            window_of(rule, 12)
    else:
        assert window_of(rule, 12) == window


def test_models_with_other_attention_are_rejected_with_the_reason() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_local_experts": 2}
    others = (
        random_decoder("Llama", attention_dropout=0.1),
        random_decoder("Qwen2", layer_types=["linear_attention", "full_attention"]),
        AutoModelForSequenceClassification.from_config(GptOssConfig(vocab_size=9, **sizes)),
    )
    for model in others:
        with pytest.raises(ExpansionImpossible, match=type(model).__name__):
            use_expanded_attention(model)
    model = random_decoder("GPT-2, learned positions", attn_pdrop=0.5).train()
    use_expanded_attention(model)
    with pytest.raises(ExpansionImpossible, match="dropout"):
        packed(model, in_rows(KNOWN_PAIRS, BatchShape(2, 64)), expand=True)
    flex = tiny_model("Llama")
    flex.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="flex_attention"):
        use_tree_masks(flex)
