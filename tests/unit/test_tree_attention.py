"""Packed rows give the rewards and gradients of the padded forward, for every family of decoders."""

from functools import cache
from typing import Any

import peft
import pytest
import torch
import transformers
from decoders import (
    FAMILIES,
    KNOWN_PAIRS,
    PAD,
    PROMPT,
    TINY,
    Pairs,
    StayInFloat64,
    gradients,
    packed,
    padded,
    random_decoder,
    rows_of,
)
from drawn_pairs import pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from trl_tpu.modeling.packability import PROVEN_TYPES, check_packing_is_exact
from trl_tpu.modeling.packed_attention import tree_rule, use_tree_masks
from trl_tpu.packing.pack import pack, pack_unpadded
from trl_tpu.packing.shapes import RowPlan, RowShape

EAGER = {"Llama, eager": "Llama", "Mistral, sliding window, eager": "Mistral, sliding window"}
ALL = [*FAMILIES, *EAGER]


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    if family in EAGER:
        family, changes = EAGER[family], {"attn_implementation": "eager", **changes}
    model = random_decoder(family, **changes)
    use_tree_masks(model)
    return model


model_of = cache(tiny_model)


LONG = 32  # what the largest pair of the tests takes
LAYOUTS = {
    "one micro-batch": RowPlan((RowShape(2, 160),)),
    "micro-batches": RowPlan((RowShape(1, 12), RowShape(2, LONG)), (RowShape(1, LONG), RowShape(2, 8))),
    "tight": None,
}


CASES = [(family, layout) for family in ALL for layout in LAYOUTS]


def packed_in(layout: str, model: nn.Module, pairs: Pairs) -> torch.Tensor:
    """The rewards [P, 2], put together from all micro-batches."""
    rows, plan = rows_of(pairs), LAYOUTS[layout]
    if plan is None:
        some = pack_unpadded(rows, PAD, attention_crossover_length=20)
    else:
        some = pack(rows, plan, len(pairs), PAD)
    return packed(model, *(each.map_tensors(torch.from_numpy) for each in some))


def assert_equal_in_both(model: nn.Module, pairs: Pairs, layout: str) -> None:
    with StayInFloat64():
        expected, rewards = padded(model, pairs), packed_in(layout, model, pairs)
        theirs, ours = gradients(model, expected), gradients(model, rewards)
    assert rewards.dtype == torch.float64
    torch.testing.assert_close(rewards, expected, rtol=1e-9, atol=1e-9)
    assert ours.keys() == theirs.keys()
    assert ours
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-9, atol=1e-9, msg=lambda text, at=name: f"{at}: {text}"
        )


batches = st.lists(pair, min_size=1, max_size=5)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_rewards_and_gradients_equal_the_padded_forward(family: str, layout: str) -> None:
    assert_equal_in_both(model_of(family), KNOWN_PAIRS, layout=layout)


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[1] != "one micro-batch")) for case in CASES],
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=batches)
def test_rewards_and_gradients_of_random_pairs_equal_the_padded_forward(
    family: str, layout: str, pairs: list[Any]
) -> None:
    assert_equal_in_both(model_of(family), pairs, layout=layout)


@pytest.mark.parametrize("family", ALL)
def test_trying_it_finds_every_family_exact_in_float32(family: str) -> None:
    check_packing_is_exact(tiny_model(family, vocab_size=64).float(), PAD)


def test_every_type_that_is_taken_for_exact_was_shown_to_be() -> None:
    assert {model_of(family).config.get_text_config().model_type for family in ALL} == PROVEN_TYPES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_trains_the_same(layout: str) -> None:
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("Qwen3"), lora)
    assert_equal_in_both(model, KNOWN_PAIRS, layout=layout)
    found = gradients(model, packed_in(layout, model, KNOWN_PAIRS))
    assert any("lora_A" in name for name in found) and any("score" in name for name in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_layers_train_the_same(layout: str) -> None:
    model = tiny_model("GPT-NeoX").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal_in_both(model, KNOWN_PAIRS, layout=layout)


def test_a_window_counts_positions_not_columns() -> None:
    """The other tail stands between a tail and its prompt; it must not use up the window."""
    pairs = [(PROMPT + [1] * 9, PROMPT + [2, 3])]
    model = tiny_model("Mistral, sliding window")
    for layout in LAYOUTS:
        torch.testing.assert_close(packed_in(layout, model, pairs), padded(model, pairs), rtol=1e-9, atol=1e-9)
    subtree_end, positions = torch.tensor([[6, 6, 5, 5, 5, 6]]), torch.tensor([[0, 1, 2, 3, 4, 2]])

    def window(row: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key > query - 2)

    rule = tree_rule(subtree_end, positions, window)
    row, column = torch.zeros(1, 1, dtype=torch.long), torch.arange(6)
    visible = rule(row, row, column[:, None], column[None, :])
    assert visible[5].tolist() == [False, True, False, False, False, True]
    assert visible[4].tolist() == [False, False, False, True, True, False]


def test_a_model_that_cannot_is_an_error_that_says_what_to_do() -> None:
    model = tiny_model("Llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        use_tree_masks(model)
    causal = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        packed_in("tight", causal, KNOWN_PAIRS)
