"""Experts in static shapes equal transformers' experts, in rewards and in every gradient."""

import pytest
import torch
from decoders import TINY, VOCAB
from transformers import AutoModelForSequenceClassification, GptOssConfig, MixtralConfig, Qwen3MoeConfig, set_seed

from trl_tpu.modeling.static_shapes import use_static_shapes

CONFIGS = {
    "Qwen3-MoE": Qwen3MoeConfig(**TINY, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12),
    "Mixtral": MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    # biases, and transposed weights
    "GPT-OSS": GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_static_experts_equal_transformers_experts(name: str) -> None:
    set_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS[name], attn_implementation="eager").double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation("eager")
    ids = torch.randint(1, VOCAB, (3, 11))

    def rewards_and_gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = model(ids).logits
        logits.square().sum().backward()
        return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, expected_gradients = rewards_and_gradients()
    use_static_shapes(model)
    rewards, gradients = rewards_and_gradients()
    torch.testing.assert_close(rewards, expected, atol=1e-9, rtol=1e-9)  # float64; the router works in float32
    assert gradients.keys() == expected_gradients.keys()
    for parameter_name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter_name], atol=1e-8, rtol=1e-7)
