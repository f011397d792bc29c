"""Least memory and least traffic of a step: against real tensors, and against arithmetic on small meshes."""

from math import prod
from typing import Any

import pytest
import torch
from planned import workload
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu.modeling.model_shape import read_model
from trl_tpu.packing.lengths import PairLengths
from trl_tpu.parallel.chips import parse_topology
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.parallel.sharding_plan import Placement
from trl_tpu.plan.needs import least_memory, least_traffic, optimizer_copies
from trl_tpu.plan.workload import Layout

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
ROWS, LENGTH = 8, 16


def real(model_type: str = "llama", **sizes: Any) -> Any:
    config = AutoConfig.for_model(model_type, num_labels=1, pad_token_id=0, **SIZES | sizes)
    return AutoModelForSequenceClassification.from_config(config)


def layout_of(model: Any, mesh: MeshShape, remat: str = "full", attention: str = "expanded") -> Layout:
    """One pair to a row."""
    planned = workload(model, PairLengths.of_size(LENGTH), packed_attention=attention, row_length=LENGTH)
    layout = Layout(planned, parse_topology("v6e:2x4"), mesh, remat, ROWS // mesh.batch_shards)
    assert layout.shape == (ROWS, LENGTH)
    return layout


def on_first_device(tensor: torch.Tensor, placement: Placement, mesh: MeshShape) -> torch.Tensor:
    for dim, axes in enumerate(placement.axes):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            tensor = tensor.chunk(mesh.sizes[axis], dim)[0]
    return tensor


@pytest.mark.parametrize("mesh", [MeshShape(fsdp=8), MeshShape(data=2, fsdp=2, tensor=2), MeshShape(data=8)], ids=str)
def test_state_is_what_real_shards_and_real_moments_take(mesh: MeshShape) -> None:
    model = real()
    layout = layout_of(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    weights = moments = gradients = 0
    for name, parameter in model.named_parameters():
        placement = layout.placements[name]
        state = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
        weights += on_first_device(parameter, placement, mesh).numel() * 4
        gradients += on_first_device(parameter.grad, placement, mesh).numel() * 4
        moments += sum(on_first_device(each, placement, mesh).numel() * 4 for each in state)
    memory = least_memory(layout)
    assert (memory.weights, memory.optimizer, memory.gradients) == (weights, moments, gradients)


def test_frozen_weights_have_no_moments_and_no_gradients() -> None:
    model = real()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("score" in name)
    memory = least_memory(layout_of(model, MeshShape()))
    assert memory.gradients == 32 * 4
    assert memory.optimizer == 2 * 32 * 4


@pytest.mark.parametrize(("optim", "copies"), [("adamw_torch", 2), ("sgd", 0), ("adafactor", 0), ("one_of_my_own", 2)])
def test_optimizers_keep_their_copies(optim: str, copies: int) -> None:
    assert optimizer_copies(optim) == copies


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_kept_activations_are_what_the_products_of_a_real_model_give_and_take(model_type: str) -> None:
    model = real(model_type)
    given: list[int] = []
    taken: dict[int, torch.Tensor] = {}
    inputs: list[torch.Tensor] = []

    def watch(_module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        given.append(output.numel())
        taken[id(args[0])] = args[0]

    def note_input(_module: nn.Module, args: tuple[torch.Tensor]) -> None:
        inputs.append(args[0])

    for layer in model.model.layers:
        layer.register_forward_pre_hook(note_input)
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(watch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.ones(ROWS, LENGTH, dtype=torch.long))
    layer_inputs = sum(each.numel() * each.element_size() for each in inputs)

    layout = layout_of(model, MeshShape(), remat="full")
    assert least_memory(layout).activations == layer_inputs
    dots = least_memory(layout_of(model, MeshShape(), remat="dots")).activations
    assert dots == layer_inputs + 2 * sum(given)
    everything = least_memory(layout_of(model, MeshShape(), remat="none")).activations
    assert everything == dots + layer_inputs + 2 * sum(each.numel() for each in taken.values())


def test_activations_are_split_over_batch_axes_and_inner_features_over_tensor() -> None:
    model = real()
    whole = least_memory(layout_of(model, MeshShape(), remat="dots")).activations
    rows = least_memory(layout_of(model, MeshShape(data=2, fsdp=2), remat="dots")).activations
    assert rows == whole / 4
    features = least_memory(layout_of(model, MeshShape(tensor=2), remat="dots")).activations
    # q, k, v, gate and up are split; o and down, and layer inputs, are whole
    split = 2 * ROWS * LENGTH * (64 + 32 + 32 + 48 + 48) * 2
    assert features == whole - split / 2


def test_masks_add_a_score_for_each_head_query_and_key() -> None:
    plain = least_memory(layout_of(real(), MeshShape(fsdp=2), remat="dots")).activations
    masks = least_memory(layout_of(real(), MeshShape(fsdp=2), remat="dots", attention="masks")).activations
    assert masks - plain == 2 * (ROWS // 2) * 4 * LENGTH**2 * 2
    full = [least_memory(layout_of(real(), MeshShape(), attention=each)).activations for each in ("expanded", "masks")]
    assert full[0] == full[1]


def test_of_experts_those_that_tokens_are_routed_to_are_kept() -> None:
    model = real("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    kept = least_memory(layout_of(model, MeshShape(), remat="dots")).activations
    a_token = 64 + 32 + 32 + 32 + 4 + 2 * (2 * 24 + 32)  # q, k, v, o, router, two experts' gate-up and down
    assert kept == ROWS * LENGTH * 2 * (32 * 4 + 2 * a_token)


# ---- traffic


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once() -> None:
    model = real()
    matrices = vectors = 0
    for name, parameter in model.named_parameters():
        if "embed" not in name:
            matrices += parameter.numel() * (parameter.dim() > 1)
            vectors += parameter.numel() * (parameter.dim() == 1)
    lookups = ROWS * LENGTH // 8 * 32 * 4  # a chip's own tokens, in float32; and their gradients
    moved = 3 * (2 * matrices + 4 * vectors) + 2 * lookups
    assert least_traffic(layout_of(model, MeshShape(fsdp=8))) == {"fsdp": moved * 7 // 8}  # an eighth is there already


def test_frozen_weights_are_gathered_but_not_scattered() -> None:
    model = real()
    trained = least_traffic(layout_of(model, MeshShape(fsdp=8)))["fsdp"]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = least_traffic(layout_of(model, MeshShape(fsdp=8)))["fsdp"]
    lookups = ROWS * LENGTH // 8 * 32 * 4 * 7 // 8
    assert frozen - lookups == pytest.approx((trained - 2 * lookups) * 2 / 3)


def test_data_adds_up_gradients_and_tensor_what_blocks_give() -> None:
    model = real()
    parameters = sum(p.numel() * (2 if p.dim() > 1 else 4) for p in model.parameters())
    embedding = model.model.embed_tokens.weight.numel() * 2  # not in products: float32
    assert least_traffic(layout_of(model, MeshShape(data=8)))["data"] == 2 * (parameters + embedding) * 7 // 8
    one = ROWS * LENGTH * 32 * 2  # of which half comes from the other chip, and half of the sum
    lookups = one  # in float32, of which half comes from the other chip
    for remat, times in (("none", 2 * 4), ("full", 2 * 4 + 2)):  # of two layers, two blocks, there and back
        traffic = least_traffic(layout_of(model, MeshShape(tensor=2), remat=remat))
        assert traffic == {"tensor": times * one + lookups}


def test_one_chip_sends_nothing() -> None:
    assert least_traffic(layout_of(real(), MeshShape())) == {}


def test_every_weight_of_a_real_model_is_counted() -> None:
    model = real("gemma3_text")
    shape = read_model(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert all(weight.numel == prod(weight.shape) for weight in shape.weights)
