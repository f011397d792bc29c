"""Attention in expanded rows gives the rewards and gradients of the padded forward and of the dense way."""

from functools import cache
from typing import Any

import peft
import pytest
import torch
from decoders import (
    FAMILIES,
    KNOWN_PAIRS,
    PROMPT,
    Pairs,
    StayInFloat64,
    gradients,
    in_rows,
    packed,
    padded,
    random_decoder,
)
from drawn_pairs import pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForSequenceClassification, GptOssConfig, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from trl_tpu.modeling.expanded_attention import ExpansionImpossible, use_expanded_attention, window_of
from trl_tpu.modeling.packed_attention import use_tree_masks
from trl_tpu.packing.shapes import RowShape

ROOMY = (RowShape(2, 40), RowShape(2, 64), RowShape(1, 180))


def two_ways(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model twice: with masks and with expanded rows."""
    dense, expanded = random_decoder(family), random_decoder(family)
    use_tree_masks(dense)
    use_expanded_attention(expanded)
    return dense, expanded


both_ways = cache(two_ways)


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def assert_three_ways_agree(dense: nn.Module, expanded: nn.Module, pairs: Pairs, *shapes: RowShape) -> None:
    rows = in_rows(pairs, *(shapes or ROOMY))
    with StayInFloat64():
        expected = padded(dense, pairs)
        results = [expected, packed(dense, rows), packed(expanded, rows, expand=True)]
        found = [gradients(model, rewards) for model, rewards in zip((dense, dense, expanded), results, strict=True)]
    for rewards, grads in zip(results[:2], found[:2], strict=True):
        assert_equal(results[2], rewards)
        assert found[2].keys() == grads.keys() and grads
        for name in grads:
            torch.testing.assert_close(
                found[2][name], grads[name], rtol=1e-9, atol=1e-9, msg=lambda text, at=name: f"{at}: {text}"
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_and_gradients_equal_the_padded_forward_and_the_dense_way(family: str) -> None:
    assert_three_ways_agree(*both_ways(family), KNOWN_PAIRS)
    assert_three_ways_agree(*both_ways(family), KNOWN_PAIRS, RowShape(1, 180))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=st.lists(pair, min_size=1, max_size=5))
def test_random_pairs_too(family: str, pairs: Pairs) -> None:
    assert_three_ways_agree(*both_ways(family), pairs)


def test_lora_trains_the_same() -> None:
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    models = []
    for model in two_ways("Qwen3"):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(model, lora))
    assert_three_ways_agree(*models, KNOWN_PAIRS)


def test_layers_recomputed_in_the_backward_know_their_rows() -> None:
    """The backward runs where no packed rows are being read any more."""
    dense, expanded = two_ways("GPT-NeoX")
    expanded.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert_three_ways_agree(dense, expanded, KNOWN_PAIRS)


@pytest.mark.parametrize("family", ["Llama", "Mistral, sliding window", "Gemma2, soft cap, mixed windows"])
def test_other_batches_are_attended_to_as_before(family: str) -> None:
    """Padded batches, and packed rows that come without their expansion."""
    dense, expanded = both_ways(family)
    with StayInFloat64():
        assert_equal(padded(expanded, KNOWN_PAIRS), padded(dense, KNOWN_PAIRS))
        rows = in_rows(KNOWN_PAIRS, *ROOMY)
        assert_equal(packed(expanded, rows), padded(dense, KNOWN_PAIRS))


def test_no_tensor_has_the_row_length_squared_but_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watch(StayInFloat64):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs)
            sizes.extend([result.numel()] if isinstance(result, torch.Tensor) else [])
            return result

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        return q * k.mean() + v.mean()

    monkeypatch.setattr("trl_tpu.runtime.native.Runtime.segment_attention", staticmethod(kernel))
    rows = in_rows([(PROMPT * 8 + [1], PROMPT * 8 + [2])], RowShape(1, 512))
    _, expanded = both_ways("Mistral, sliding window")
    with Watch():
        packed(expanded, rows, expand=True).sum().backward()
    assert 512 * 32 <= max(sizes) < 512 * 512 / 2


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (causal_mask_function, None),
        (sliding_window_causal_mask_function(5), 5),
        (sliding_window_causal_mask_function(1), 1),
        (sliding_window_causal_mask_function(12), None),  # as wide as the rows
        (sliding_window_causal_mask_function(11), 11),
        (sliding_window_causal_mask_function(4000), None),
    ],
)
def test_a_window_is_read_from_the_rule(rule: Any, window: int | None) -> None:
    assert window_of(rule, 12) == window


def prefix_rule(row: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 3


def chunks(size: int) -> Any:
    return lambda row, head, query, key: (key <= query) & (key // size == query // size)


REFUSED = {
    "bidirectional": bidirectional_mask_function,
    "prefix first": or_masks(causal_mask_function, prefix_rule),
    "strictly causal": lambda row, head, query, key: key < query,
    "chunks from where the text begins": chunked_causal_mask_function(5, torch.zeros(2)),
    **{f"chunks of {size}": chunks(size) for size in range(2, 12)},
}


@pytest.mark.parametrize("rule", REFUSED.values(), ids=REFUSED)
def test_any_other_rule_is_refused(rule: Any) -> None:
    with pytest.raises(ExpansionImpossible):
        window_of(rule, 12)


def test_models_that_attend_otherwise_are_refused_with_the_reason() -> None:
    for changes, reason in (
        ({"family": "Llama", "attention_dropout": 0.1}, "dropout"),
        ({"family": "Qwen2", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ):
        with pytest.raises(ExpansionImpossible, match=reason):
            use_expanded_attention(random_decoder(**changes))  # type: ignore[arg-type]
    sinks = GptOssConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_local_experts=2)
    with pytest.raises(ExpansionImpossible, match="sinks"):
        use_expanded_attention(AutoModelForSequenceClassification.from_config(sinks))
    model = random_decoder("GPT-2, learned positions", attn_pdrop=0.5).train()
    use_expanded_attention(model)
    with pytest.raises(ExpansionImpossible, match="dropout"):
        packed(model, in_rows(KNOWN_PAIRS, *ROOMY), expand=True)
