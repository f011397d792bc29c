"""Layers as a loop: the same loss and gradients as separate layers, from a program with one layer.

Activation checkpointing: equal gradients with more multiplications, and no other change of the program.
"""

import json
import math
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
from training import losses, trained
from transformers import PreTrainedModel, TrainerCallback

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.modeling.recurrent_layers import recompute_in_same_batch, use_tree_states
from trl_tpu.modeling.static_shapes import use_static_shapes
from trl_tpu.runtime import current
from trl_tpu.runtime import layer_loop as scan

CASES = {
    "llama:padded": {},
    "llama_lora:packed": {"remat": "dots"},
    "qwen3_moe:padded": {},
    "qwen3:packed": {"bf16": True, "remat": "dots"},
    "llama:packed": {"packed_attention": "expanded"},
    "llama_grouped:packed": {"frozen_parameters": "layernorm|embed_tokens"},
}
LONG = ["llama:padded", "qwen3:packed", "llama:packed"]


@pytest.fixture(scope="module")
def scans(request: pytest.FixtureRequest, take_steps: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
    """Return the scans of one step by case and by use of the loop, for the selected cases."""
    return take_steps([run_of(case, scan) for case in selected_cases(request, "case") for scan in (False, True)])


def run_of(case: str, scan: bool) -> str:
    return f"{case}:{json.dumps(CASES[case] | {'scan_layers': scan})}"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES])
def test_scanned_loss_and_gradients_equal_separate_layers(scans: dict[str, Any], case: str) -> None:
    unrolled, scanned = (scans[run_of(case, scan)] for scan in (False, True))
    assert scanned["dots"] < 0.7 * unrolled["dots"]  # compared with two layers
    assert scanned["loss"] == pytest.approx(unrolled["loss"], abs=1e-6)
    assert scanned["gradients"].keys() == unrolled["gradients"].keys()
    # float32: differences of weights of about 1; bfloat16 products: sums rounded in another order
    tolerance = {"atol": 1e-4, "rtol": 2e-2} if CASES[case].get("bf16") else {"atol": 1e-6, "rtol": 1e-5}
    for name, gradient in unrolled["gradients"].items():
        assert np.abs(gradient).max() > 0, name
        np.testing.assert_allclose(scanned["gradients"][name], gradient, **tolerance, err_msg=name)


class RecordingCallback(TrainerCallback):
    """Records the number of compiled programs and the parameter names at the end of each step and of training."""

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.names: list[set[str]] = []

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.compiled.append(met.metric_data("CompileTime")[0])
        self.names.append({name for name, _ in model.named_parameters()})


def test_later_steps_and_evaluations_compile_nothing(config: Any, model_folder: str) -> None:
    """A second training with the same optimizer compiles nothing, either."""
    settings = {"scan_layers": True, "packing": False, "pad_to_multiple_of": 64, "log_grad_norms": True}
    args = config(max_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1, **settings)
    watching, pairs = RecordingCallback(), tiny.made_up_pairs(40)
    data = {"train_dataset": pairs, "eval_dataset": pairs.select(range(8))}
    trainer = RewardTrainer(model_folder, args, **data, callbacks=[watching])
    own = dict(trainer.model.named_parameters())
    trainer.train()
    (first, _) = losses(trainer)
    log = trainer.state.log_history[0]
    norms = [log[f"grad_norm/{name}"] for name in own]  # one norm per layer
    assert log["grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
    args.max_steps = 6
    trainer.train()
    assert losses(trainer)[-1] < first
    assert len(watching.compiled) == 8
    assert watching.compiled[7] == watching.compiled[2]  # the second training reuses the first one's programs
    assert all(names < own.keys() for names in watching.names)  # names of one layer
    assert all(own[name] is parameter for name, parameter in trainer.model.named_parameters())
    optimizer = trainer.optimizer.optimizer
    assert {state["step"].item() for state in optimizer.state.values()} == {8}, "moments are kept"
    assert all(isinstance(group["lr"], float) for group in optimizer.param_groups)


def test_offloaded_inputs_change_no_loss(config: Any, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's CPU devices support no placement in host memory, so the test replaces it with copies."""
    placed: list[int] = []

    def place(tensor: torch.Tensor) -> torch.Tensor:
        placed.append(tensor.dim())
        return tensor.clone()

    monkeypatch.setattr(scan, "place_to_host", place)
    monkeypatch.setattr(scan, "place_to_device", place)
    settings = {"packing": False, "pad_to_multiple_of": 64, "max_steps": 3, "logging_steps": 1}
    found = []
    for on_host in (False, True):
        args = config(scan_layers=True, activation_offloading=True, **settings)
        trainer = trained(RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(40)))
        found.append(losses(trainer))
        assert (3 in placed) == on_host
        monkeypatch.setattr(type(current()), "activations_on_host", lambda _: scan.OnHost())
    assert found[1] == pytest.approx(found[0], abs=1e-7)
    with pytest.raises(ValueError, match="activation_offloading=True"):
        config(activation_offloading=True)


def test_scan_without_recomputation_is_rejected(config: Any) -> None:
    with pytest.raises(ValueError, match="scan_layers"):
        config(scan_layers=True, gradient_checkpointing=False)


# ---- activation checkpointing


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

REMAT_CASES = [
    "llama:packed",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("llama_lora:padded", "qwen3_moe:padded")),
]
POLICIES = ["none", "full", "dots"]


@pytest.fixture(scope="module")
def remats(request: pytest.FixtureRequest, take_steps: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of one step by case and policy, for the selected cases."""
    runs = [f'{kind}:{{"remat": "{policy}"}}' for kind in selected_cases(request, "kind") for policy in POLICIES]
    return take_steps(runs)


@pytest.mark.parametrize("kind", REMAT_CASES)
def test_full_remat_repeats_products_and_dots_keeps_them(remats: dict[str, Any], kind: str) -> None:
    none, full, dots = (remats[f'{kind}:{{"remat": "{policy}"}}'] for policy in POLICIES)
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
