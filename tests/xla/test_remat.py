"""Activation checkpointing on XLA: the same gradients, from more multiplications, with nothing else in the program."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch_xla
import torch_xla.debug.metrics as met
from chosen import chosen
from recent_families import tiny_classifier
from transformers import PreTrainedModel

from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.modeling.static_shapes import fit_to_device
from trl_tpu.runtime import current


def model_on_xla(checkpointing: bool, family: str | None = None) -> PreTrainedModel:
    if family is None:
        model: Any = tiny.tiny_model(tiny.tiny_tokenizer(["a few words to spell"], vocab_size=300))
    else:
        model = tiny_classifier(family, vocab_size=300, vocab_size_per_layer_input=300)
    fit_to_device(model, is_static=True)
    runtime = current()
    model.to("xla").train().tie_weights()
    if checkpointing:
        model.activation_checkpointing_enable()
        runtime.recompute_layers(model, "full")
    return model


def gradients_and_program(
    checkpointing: bool, dtype: torch.dtype | None, family: str | None = None
) -> tuple[dict[str, torch.Tensor], str]:
    """Every parameter's gradient, and the program of one forward and backward as XLA gets it."""
    model = model_on_xla(checkpointing, family)
    ids = torch.randint(2, 200, (8, 32), generator=torch.Generator().manual_seed(0)).to("xla")
    torch_xla.sync(wait=True)
    with torch.autocast("xla", dtype=dtype, enabled=dtype is not None):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float().square().sum()
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    program = torch_xla._XLAC._get_xla_tensors_hlo(list(gradients.values()))
    return to_host(gradients, current()), program


def test_recomputation_repeats_the_forwards_precision() -> None:
    """Autocast is on in the forward only; the recomputed forward must run under it as well."""
    stored, _ = gradients_and_program(False, torch.bfloat16)
    recomputed, program = gradients_and_program(True, torch.bfloat16)
    assert "bf16" in program
    for name, gradient in stored.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-3, rtol=1e-2, msg=name)


@pytest.mark.parametrize("family", ["gemma4_text", "zamba2"])
def test_what_layers_are_given_by_name_gets_its_gradient(family: str) -> None:
    """Gemma 4's later layers read keys and values of earlier ones from a dictionary; Zamba 2's have a keyword."""
    stored, _ = gradients_and_program(False, None, family)
    recomputed, _ = gradients_and_program(True, None, family)
    assert stored.keys() == recomputed.keys()
    for name, gradient in stored.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


def test_parameters_are_not_outputs_of_the_program() -> None:
    """torch_xla's own checkpoint puts its barrier on the parameters in place, and every program returns them all."""
    model = model_on_xla(checkpointing=True)
    ids = torch.randint(2, 200, (8, 32)).to("xla")
    torch_xla.sync(wait=True)
    reads = met.counter_value("aten::_local_scalar_dense")
    before = {name: torch_xla._XLAC._xla_get_tensor_id(parameter) for name, parameter in model.named_parameters()}
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum().backward()
    after = {name: torch_xla._XLAC._xla_get_tensor_id(parameter) for name, parameter in model.named_parameters()}
    assert before == after
    assert met.counter_value("aten::_local_scalar_dense") == reads  # and nothing was read on the host


# ---- counted in the optimised programs, in a process of its own that has them written

CASES = [
    "llama:packed",
    *(pytest.param(case, marks=pytest.mark.long) for case in ("llama_lora:padded", "qwen3_moe:padded")),
]
POLICIES = ["none", "full", "dots"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, steps_apart: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
    """What one step gave, by case and policy, of the cases that were chosen."""
    runs = [f'{case}:{{"remat": "{policy}"}}' for case in chosen(request, "case") for policy in POLICIES]
    return steps_apart(runs)


@pytest.mark.parametrize("case", CASES)
def test_full_multiplies_again_and_dots_does_not_with_the_same_gradients(results: dict[str, Any], case: str) -> None:
    none, full, dots = (results[f'{case}:{{"remat": "{policy}"}}'] for policy in POLICIES)
    layers, dots_a_layer = 2, 5  # at least: XLA merges some products of the same factor, such as queries and keys
    assert full["dots"] >= none["dots"] + layers * dots_a_layer
    assert dots["dots"] == none["dots"]
    for other in (full, dots):
        assert other["loss"] == pytest.approx(none["loss"], abs=1e-6)
        assert other["gradients"].keys() == none["gradients"].keys()
        for name, gradient in none["gradients"].items():
            assert np.abs(gradient).max() > 0, name
            # differences of float32 weights around 1
            np.testing.assert_allclose(other["gradients"][name], gradient, atol=1e-6, rtol=1e-5, err_msg=name)
