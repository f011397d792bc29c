"""Activation checkpointing on XLA: equal gradients with more multiplications, and no other change of the program."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch_xla
import torch_xla.debug.metrics as met
from recent_families import tiny_classifier
from subprocesses import selected_cases
from transformers import PreTrainedModel

from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.modeling.recurrent_layers import recompute_in_same_batch, use_tree_states
from trl_tpu.modeling.static_shapes import use_static_shapes
from trl_tpu.runtime import current


def model_on_xla(checkpointing: bool, family: str | None = None) -> PreTrainedModel:
    if family is None:
        model: Any = tiny.tiny_model(tiny.tiny_tokenizer(["a few words to spell"], vocab_size=300))
    else:
        model = tiny_classifier(family, vocab_size=300, vocab_size_per_layer_input=300)
    use_static_shapes(model)
    runtime = current()
    model.to("xla").train().tie_weights()
    if checkpointing:
        model.activation_checkpointing_enable()
        runtime.recompute_layers(model, "full")
        use_tree_states(model)  # as in packed runs
        recompute_in_same_batch(model)
    return model


def gradients_and_program(
    checkpointing: bool, dtype: torch.dtype | None, family: str | None = None
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the gradients and the program of one forward and backward as passed to XLA."""
    model = model_on_xla(checkpointing, family)
    ids = torch.randint(2, 200, (8, 32), generator=torch.Generator().manual_seed(0)).to("xla")
    torch_xla.sync(wait=True)
    with torch.autocast("xla", dtype=dtype, enabled=dtype is not None):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float().square().sum()
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    program = torch_xla._XLAC._get_xla_tensors_hlo(list(gradients.values()))
    return to_host(gradients, current()), program


@pytest.mark.parametrize(("dtype", "family"), [(torch.bfloat16, None), (None, "gemma4_text"), (None, "zamba2")])
def test_recomputed_layers_have_the_same_gradients(dtype: torch.dtype | None, family: str | None) -> None:
    """Autocast is active only in the forward; the recomputed forward must use it, too.

    Gemma 4's later layers read earlier keys and values from a dictionary; Zamba 2's layers have a keyword input.
    """
    stored, _ = gradients_and_program(False, dtype, family)
    recomputed, program = gradients_and_program(True, dtype, family)
    assert ("bf16" in program) == (dtype is torch.bfloat16) and stored.keys() == recomputed.keys()
    for name, gradient in stored.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_parameters_are_not_outputs_of_the_program() -> None:
    """torch_xla's checkpoint applies its barrier to parameters in place, so every program would return all of them."""
    model = model_on_xla(checkpointing=True)
    ids = torch.randint(2, 200, (8, 32)).to("xla")
    torch_xla.sync(wait=True)
    reads = met.counter_value("aten::_local_scalar_dense")
    before = {name: torch_xla._XLAC._xla_get_tensor_id(parameter) for name, parameter in model.named_parameters()}
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum().backward()
    after = {name: torch_xla._XLAC._xla_get_tensor_id(parameter) for name, parameter in model.named_parameters()}
    assert before == after
    assert met.counter_value("aten::_local_scalar_dense") == reads  # no reads from the device


# ---- counts in optimized programs, dumped by a subprocess

CASES = [
    "llama:packed",
    *(pytest.param(case, marks=pytest.mark.long) for case in ("llama_lora:padded", "qwen3_moe:padded")),
]
POLICIES = ["none", "full", "dots"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, take_steps: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of one step by case and policy, for the selected cases."""
    runs = [f'{case}:{{"remat": "{policy}"}}' for case in selected_cases(request, "case") for policy in POLICIES]
    return take_steps(runs)


@pytest.mark.parametrize("case", CASES)
def test_full_remat_repeats_products_and_dots_keeps_them(results: dict[str, Any], case: str) -> None:
    none, full, dots = (results[f'{case}:{{"remat": "{policy}"}}'] for policy in POLICIES)
    layers, dots_a_layer = 2, 5  # lower bounds: XLA merges products with a common factor, such as queries and keys
    assert full["dots"] >= none["dots"] + layers * dots_a_layer
    assert dots["dots"] == none["dots"]
    for other in (full, dots):
        assert other["loss"] == pytest.approx(none["loss"], abs=1e-6)
        assert other["gradients"].keys() == none["gradients"].keys()
        for name, gradient in none["gradients"].items():
            assert np.abs(gradient).max() > 0, name
            # differences of float32 weights of about 1
            np.testing.assert_allclose(other["gradients"][name], gradient, atol=1e-6, rtol=1e-5, err_msg=name)
