"""Stacked, recomputed and static layers give the results of transformers' own layers, or raise.

These tests run in plain torch without the loop, with given gradients; tests/xla/test_scan.py runs the loop.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from decoders import TINY, VOCAB
from peft import LoraConfig, get_peft_model
from tiny import tiny_family
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification, set_seed
from transformers.optimization import Adafactor

from trl_tpu import RewardConfig
from trl_tpu.errors import UserError
from trl_tpu.modeling.layers import LayerStack, by_layer, find_layers
from trl_tpu.modeling.static_shapes import use_static_shapes
from trl_tpu.runtime.native import MATMULS, Runtime

LAYERS = 3


def make_model() -> LlamaForSequenceClassification:
    tokenizer = tiny.tiny_tokenizer(["a few words to spell"], vocab_size=300)
    return tiny.tiny_model(tokenizer, layers=LAYERS)


def make_stack(model: nn.Module) -> LayerStack:
    return LayerStack(model, {}, "full", Runtime())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with transformers' two parameter groups, each in a different order."""
    named = list(model.named_parameters())[::-1]
    decaying = [parameter for name, parameter in named if "norm" not in name]
    others = [parameter for name, parameter in named if "norm" in name]
    return torch.optim.AdamW([{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def give_stacked_gradients(model: nn.Module, like: nn.Module) -> None:
    own = dict(like.named_parameters())
    for name, parameter in model.named_parameters():
        layers = [own[name.replace("layers.0", f"layers.{number}")].grad for number in range(LAYERS)]
        parameter.grad = torch.stack(layers) if "layers.0" in name else own[name].grad.clone()


def test_stacked_steps_equal_steps_of_separate_layers() -> None:
    model, plain = make_model(), make_model()
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    own = dict(model.named_parameters())
    stack = make_stack(model)
    for seed in range(4):
        give_gradients(plain, seed)
        if seed == 2:  # stack after some steps, with moments
            stack.unstack()
        stack.stack(optimizer)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 3 + 9
        give_stacked_gradients(model, plain)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, plain)]
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-6)
        plain_optimizer.step()
        optimizer.step()
    stack.unstack()
    for name, parameter in plain.named_parameters():
        assert own[name] is dict(model.named_parameters())[name]
        torch.testing.assert_close(own[name], parameter, atol=1e-7, rtol=1e-6, msg=name)  # rounding of the norms
        state, plain_state = optimizer.state[own[name]], plain_optimizer.state[parameter]
        assert state.keys() == plain_state.keys() != set()
        for kind, value in plain_state.items():
            torch.testing.assert_close(state[kind], value, atol=1e-7, rtol=1e-6, msg=f"{kind} of {name}")
    for before, group in zip(groups, optimizer.param_groups, strict=True):
        assert all(one is other for one, other in zip(before, group["params"], strict=True))
    assert len(optimizer.state) == len(own)


def test_stacked_model_holds_weights_once_and_names_them_by_layer() -> None:
    model = get_peft_model(make_model(), LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stack = make_stack(model)
    stack.stack(torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad]))
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(map(torch.numel, before.values()))
    assert not any(part.numel() for weight in stack._weights for part in weight.parts)
    found = by_layer(model, model.state_dict(keep_vars=True))
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


OPTIMIZERS = [
    (lambda model: torch.optim.SGD([{"params": layer.parameters()} for layer in model.model.layers]), "group"),
    (lambda model: torch.optim.SGD(model.model.layers[-1].parameters()), "not at all"),
    (lambda model: Adafactor(model.parameters()), "Adafactor"),
]


@pytest.mark.parametrize(("make_optimizer", "named"), OPTIMIZERS)
def test_optimizer_with_different_results_on_stacked_layers_is_rejected(make_optimizer: Any, named: str) -> None:
    model = make_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=named):
        make_stack(model).stack(make_optimizer(model))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_layers_that_cannot_be_a_loop_are_rejected_by_name() -> None:
    shared, random = make_model(), make_model()
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    for layer in random.model.layers:
        layer.self_attn.attention_dropout = 0.1
    different = tiny_family("gemma3_text", tiny.tiny_tokenizer(["a few words to spell"], vocab_size=300))
    for model, named in ((shared, "up_proj.weight"), (random, "attention_dropout"), (different, "layers.1")):
        with pytest.raises(UserError, match=named):
            find_layers(model)


# ---- recomputation: its settings, and its effect in plain torch


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


# ---- experts in static shapes: rewards and every gradient


CONFIGS = {
    "Qwen3-MoE": transformers.Qwen3MoeConfig(**TINY, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12),
    "Mixtral": transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    # biases, and transposed weights
    "GPT-OSS": transformers.GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
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
