"""The score head computes in float32 within autocast, in every copy with the copy's own weights."""

import copy

import peft
import pytest
import tiny
import torch

from trl_tpu.modeling.score_head import find_score_head, keep_score_head_in_float32


@pytest.fixture
def model() -> torch.nn.Module:
    model = tiny.tiny_model(tiny.tiny_tokenizer(["1 2 3"]))
    for _ in range(2):  # as two trainers of one model do
        keep_score_head_in_float32(model)
    return model


def rewards(model: torch.nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(torch.tensor([[5, 6, 7]])).logits


def test_rewards_are_not_rounded(model: torch.nn.Module) -> None:
    assert rewards(model).dtype == torch.float32


def test_a_copy_scores_with_its_own_weights(model: torch.nn.Module) -> None:
    copied = copy.deepcopy(model)
    head = find_score_head(copied)
    assert head is not None
    with torch.no_grad():
        head.weight.mul_(2)
    torch.testing.assert_close(rewards(copied), 2 * rewards(model))


def test_a_head_that_adapters_copy_is_the_one_that_is_trained(model: torch.nn.Module) -> None:
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    rewards(adapted).sum().backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if ".score." in name}
    found = {name.split(".score.")[1]: gradient is not None for name, gradient in gradients.items()}
    assert found == {"original_module.weight": False, "modules_to_save.default.weight": True}
