"""Score heads compute in float32, also within autocast, and every copy uses its own weights."""

import copy
from typing import Any

import peft
import pytest
import tiny
import torch
import transformers

from trl_tpu.modeling.head_spec import find_score_head, keep_heads_in_float32


@pytest.fixture
def model() -> torch.nn.Module:
    model = tiny.tiny_model(tiny.tiny_tokenizer(["1 2 3"]))
    for _ in range(2):  # two trainers of one model patch it twice
        keep_heads_in_float32(model)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [transformers.BertConfig, transformers.LlamaConfig])
def test_rewards_of_narrow_weights_are_float32(kind: Any, dtype: torch.dtype) -> None:
    """Weights keep their dtype, as in TRL, and are trained in it."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 9}
    config = kind(**size, num_attention_heads=2, num_labels=1, pad_token_id=0, dropout=0.0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).to(dtype).eval()
    keep_heads_in_float32(model)
    (name, head), *_ = [pair for pair in model.named_children() if pair[0] in ("score", "classifier")]
    states: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    rewards_P = model(torch.tensor([[5, 6, 7]])).logits
    expected = states[0].float() @ head.weight.float().T
    expected = expected if head.bias is None else expected + head.bias.float()
    assert rewards_P.dtype == torch.float32
    torch.testing.assert_close(rewards_P, expected.flatten(0, -2)[-1:], atol=1e-6, rtol=1e-6)
    rewards_P.sum().backward()
    assert head.weight.grad.dtype == head.weight.dtype == dtype


def rewards(model: torch.nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(torch.tensor([[5, 6, 7]])).logits


def test_copied_model_scores_with_its_own_weights(model: torch.nn.Module) -> None:
    copied = copy.deepcopy(model)
    head = find_score_head(copied)
    assert head is not None
    with torch.no_grad():
        head.weight.mul_(2)
    assert rewards(model).dtype == torch.float32  # in autocast, too
    torch.testing.assert_close(rewards(copied), 2 * rewards(model))


def test_head_copied_by_peft_is_the_trained_one(model: torch.nn.Module) -> None:
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    rewards(adapted).sum().backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if ".score." in name}
    found = {name.split(".score.")[1]: gradient is not None for name, gradient in gradients.items()}
    assert found == {"original_module.weight": False, "modules_to_save.default.weight": True}
