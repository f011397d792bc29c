"""Under autocast, projections that take the same hidden states take the same cast of them."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, set_seed

from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.parallel.shard import keep_activations_split, place_model, plan_model
from trl_tpu.runtime.native import Runtime

INPUT_IDS_RL = torch.arange(2 * 8).reshape(2, 8)


def tiny_llama() -> LlamaForSequenceClassification:
    set_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    return LlamaForSequenceClassification(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=1, **heads)
    )


def split_over_tensor(model: nn.Module) -> nn.Module:
    """``model`` with the hooks it has on a mesh with `tensor`, and its weights where they are."""
    plan = plan_model(model, MeshShape(tensor=2))
    runtime, device = Runtime(), torch.device("cpu")
    keep_activations_split(model, plan, place_model(model, plan, runtime, device).placements, runtime)
    return model


def taken(model: nn.Module) -> dict[str, torch.Tensor]:
    """What each projection of the first layer is given in a forward."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        return lambda _module, inputs: found.__setitem__(name, inputs[0])

    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note(name.rpartition(".")[2]))
    model(INPUT_IDS_RL)
    return found


def test_projections_of_one_tensor_take_one_cast() -> None:
    model = split_over_tensor(tiny_llama())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inputs = taken(model)
    assert inputs["q_proj"] is inputs["k_proj"] is inputs["v_proj"]
    assert inputs["gate_proj"] is inputs["up_proj"]
    assert inputs["q_proj"] is not inputs["gate_proj"]
    assert inputs["q_proj"].dtype == inputs["gate_proj"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_the_model_is_the_same(dtype: torch.dtype | None) -> None:
    """Forwards to the bit. In backwards bfloat16 adds what projections pass back, of which each was rounded before."""
    gradients, rewards = [], []
    for make in (tiny_llama, lambda: split_over_tensor(tiny_llama())):
        model = make()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            output = model(INPUT_IDS_RL).logits
        output.sum().backward()
        rewards.append(output.detach())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*rewards)
    plain, shared = gradients
    # bfloat16 has 8 bits, and a sum of three is rounded twice more
    assert (plain - shared).norm() / plain.norm() < (2**-7 if dtype is not None else 1e-6)
