"""Recent model families: packed rows give the rewards and gradients of padded ones, also in recurrent layers."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import peft
import pytest
import torch
from decoders import PAD, StayInFloat64, gradients, packed, padded, rows_of
from recent_families import DECODERS, HYBRIDS, WITH_CLASS, tiny_classifier
from torch import nn

from trl_tpu.modeling.forward import PackingImpossible
from trl_tpu.modeling.packability import make_packable
from trl_tpu.modeling.recurrent_layers import recompute_in_same_batch, use_tree_states
from trl_tpu.packing.pack import TreeLayout, pack, pack_unpadded
from trl_tpu.packing.shapes import CHUNK, BatchShape, ShapePlan

_IDS = torch.randint(1, 64, (400,), generator=torch.Generator().manual_seed(5)).tolist()


def pair_with_prefix(depth: int, one: int, other: int) -> tuple[list[int], list[int]]:
    """Return a pair of sequences with ``depth`` shared tokens and tails of these lengths that differ at once."""
    first = _IDS[depth]
    return _IDS[:depth] + _IDS[depth : depth + one], _IDS[:depth] + ([first % 63 + 1] + _IDS[200:])[:other]


#: Branches before and after the boundaries of the 64- and 16-token chunks of scans, tails of one token, a sequence
#: that is a prefix of the other, no shared tokens, and prompts with several pairs.
PAIRS = [
    *(pair_with_prefix(depth, 3 + depth % 5, 1 + depth % 67) for depth in (1, 16, 17, 63, 64, 65)),
    *(
        (pair_with_prefix(130, 70, 65)),
        pair_with_prefix(64, 1, 1),
        pair_with_prefix(5, 0, 4),
        pair_with_prefix(128, 1, 0),
    ),
    *(([9, 8, 7], [9, 8, 7]), ([3], [4]), (_IDS[300:320], _IDS[350:390])),
    (_IDS[250:390] + [5], _IDS[250:390] + [6, 7]),
]


def exact_model(family: str, way: str = "plain") -> Any:
    """Return a model that reads packed rows, with weights far from uniform."""
    model: Any = tiny_classifier(family).double()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    if "LoRA" in way:
        layers = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and "layers.0" in name]
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=layers, init_lora_weights=False)
        model = peft.get_peft_model(model, config).double()
        model.enable_input_require_grads()
    make_packable(model, PAD, is_unpadded="planned" not in way)
    if "recomputed" in way:
        model.train().gradient_checkpointing_enable({"use_reentrant": "reentrant" in way})
        recompute_in_same_batch(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


WAYS = [
    *((family, "plain") for family in (*HYBRIDS, *DECODERS, *WITH_CLASS)),
    *((family, "planned") for family in (*HYBRIDS, "exaone4", "gpt_oss")),
    *(("qwen3_5_text", way) for way in ("recomputed", "LoRA", "recomputed, LoRA", "recomputed, LoRA, planned")),
    ("granitemoehybrid", "recomputed"),
    *((family, "segments") for family in ("llama4_text", "gpt_oss", "gemma4_text", "qwen3_5_text")),
    *((family, "rows") for family in ("llama4_text", "gpt_oss", "gemma4_text", "kimi_linear", "falcon_h1", "lfm2")),
]


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_rewards_and_gradients_equal_the_padded_ones(family: str, way: str) -> None:
    model = exact_model(family, way)
    attention: Any = way if way in ("segments", "rows") else "one by one"
    pack_sequences: Any = partial(pack_unpadded, layout=TreeLayout(attention, is_recurrent=True))
    if "planned" in way:
        pack_sequences = partial(pack, plan=ShapePlan((BatchShape(2, 1600),), chunk=CHUNK))
    (rows,) = pack_sequences(rows_of(PAIRS))
    batch = rows.map_tensors(torch.from_numpy)
    assert "planned" in way or batch.input_ids_RL.shape[1] < 0.7 * sum(len(ids) for pair in PAIRS for ids in pair)
    # recomputation runs outside the mode, with norms in float32
    rounding, mode = (1e-5, nullcontext()) if "recomputed" in way else (1e-9, StayInFloat64())
    with mode:
        expected = padded(model, PAIRS)
        rewards = packed(model, batch)
        assert rewards.std() > 0.01
        torch.testing.assert_close(rewards, expected, rtol=rounding, atol=rounding)
        theirs, ours = gradients(model, expected), gradients(model, rewards)
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        difference = (ours[name] - gradient).abs().max() / gradient.abs().max()
        # the backward computes the chunks of planned rows again, outside the mode
        assert difference < (1e-4 if "planned" in way else 100 * rounding), name


@pytest.mark.parametrize(
    ("shared", "attention", "groups"),
    [(130, "one by one", ((2, 130), (2, 60), (2, 70))), (130, "rows", ((2, 130), (4, 70))), (30, "rows", ((4, 100),))],
)
def test_rules_read_shared_tokens_once_if_that_saves_chunks(shared: int, attention: Any, groups: Any) -> None:
    pairs = [([at] * shared + [7] * 60, [at] * shared + [8] * 70) for at in (1, 2)]
    (rows,) = pack_unpadded(rows_of(pairs), layout=TreeLayout(attention, is_recurrent=True))
    assert rows.read_order is not None and rows.read_order.groups == groups


@pytest.mark.parametrize("family", ["jamba", "zamba"])
def test_layers_that_ignore_the_state_are_detected_by_trial(family: str) -> None:
    model = tiny_classifier(family)
    with pytest.raises(PackingImpossible, match="not go on"):
        make_packable(model, PAD)
    assert use_tree_states(model)  # the first call had no lasting effect
