"""Activation recomputation: its settings, and its effect in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_tpu import RewardConfig
from trl_tpu.runtime.native import MATMULS, Runtime

POLICIES = [
    ({}, "full"),
    ({"gradient_checkpointing": False}, "none"),
    ({"remat": "none"}, "none"),
    ({"remat": "dots", "gradient_checkpointing_kwargs": {"use_reentrant": False}}, "dots"),
    ({"remat": "full", "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "full"),
]


@pytest.mark.parametrize(("settings", "policy"), POLICIES)
def test_remat_refines_gradient_checkpointing(tmp_path: Path, settings: dict[str, Any], policy: str) -> None:
    args = RewardConfig(str(tmp_path), bf16=False, report_to="none", **settings)
    assert args.remat_policy == policy
    assert args.gradient_checkpointing == args.activation_checkpointing == (policy != "none")


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in MATMULS
        return function(*args, **(kwargs or {}))


def test_plain_torch_can_keep_matrix_products() -> None:
    products, gradients = {}, {}
    for policy in ("none", "full", "dots"):
        model = tiny.tiny_model(tiny.tiny_tokenizer(["a few words to spell"], vocab_size=300))
        model.set_attn_implementation("eager")
        model.train()
        if policy != "none":
            model.activation_checkpointing_enable()
            Runtime().recompute_layers(model, policy)  # type: ignore[arg-type]
        ids = torch.randint(2, 200, (8, 32), generator=torch.Generator().manual_seed(0))
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.square().sum()
        with Counting() as counting:
            loss.backward()
        products[policy] = counting.count
        gradients[policy] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert products["full"] > products["none"]
    assert products["dots"] == products["none"]
    for policy in ("full", "dots"):
        torch.testing.assert_close(gradients[policy], gradients["none"], atol=0, rtol=0)
