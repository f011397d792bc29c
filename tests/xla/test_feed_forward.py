"""Feed-forward blocks whose backward takes their features in parts: which they are, and the same gradients."""

import pytest
import torch
import torch_xla
from families import family
from tiny import made_up_pairs, tiny_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.parallel.shard import divide_feed_forward, place_model, plan_model
from trl_tpu.runtime import current, feed_forward
from trl_tpu.runtime.feed_forward import FeedForward

HIDDEN, FEATURES = 32, 96
ON_ONE = (None, None)


def block() -> LlamaMLP:
    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=FEATURES)).to("xla")


def gradients_and_program(mlp: LlamaMLP, dtype: torch.dtype | None) -> tuple[dict[str, torch.Tensor], str]:
    """Of the input and every weight, and the program of one forward and backward."""
    runtime = current()
    hidden = torch.randn(4, 16, HIDDEN, generator=torch.Generator().manual_seed(1)).to("xla").requires_grad_()
    torch_xla.sync(wait=True)
    with runtime.autocast(dtype, hidden.device):
        output = mlp(hidden)
    output.float().square().sum().backward()
    gradients = {"hidden": hidden.grad} | {name: weight.grad for name, weight in mlp.named_parameters()}
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    program = torch_xla._XLAC._get_xla_tensors_hlo([*found.values()])
    return runtime.to_host(found), program


@pytest.mark.parametrize(("shards", "parts"), [(1, 2), (4, 3), (2, 1)])
@pytest.mark.parametrize(
    # float32: sums in another order; bfloat16: the parts' sums are rounded one by one
    ("dtype", "tolerance"), [(None, {"atol": 1e-6, "rtol": 1e-5}), (torch.bfloat16, {"atol": 2e-3, "rtol": 2e-2})]
)  # fmt: skip
def test_gradients_are_those_of_the_block_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, shards: int, parts: int, dtype: torch.dtype | None, tolerance: dict[str, float]
) -> None:
    current().start()
    whole, whole_program = gradients_and_program(block(), dtype)
    itemsize = 4 if dtype is None else dtype.itemsize
    monkeypatch.setattr(feed_forward, "MOST_GATHERED", HIDDEN * FEATURES * itemsize // parts)
    mlp = block()
    mlp.gate_proj.weight.requires_grad_(parts != 3)  # a weight that is not trained has no gradient, and costs none
    mlp.forward = FeedForward(mlp, "down_proj", [ON_ONE] * 3, shards, current().constrain, current().scatter)
    found, program = gradients_and_program(mlp, dtype)
    assert found.keys() == whole.keys() - (set() if parts != 3 else {"gate_proj.weight"})
    for name, gradient in found.items():
        assert gradient.abs().max() > 1e-2, name
        torch.testing.assert_close(gradient, whole[name], **tolerance, msg=name)
    assert "opt-barrier" not in whole_program
    assert (program.count(" opt-barrier(") > 1) == (parts > 1)  # the one rounds the gradient of the last product


def test_a_divided_block_works_on_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "MOST_GATHERED", 1)
    plain, divided = block().cpu(), block().cpu()
    divided.forward = FeedForward(divided, "down_proj", [ON_ONE] * 3, 1, current().constrain, current().scatter)
    hidden = torch.randn(2, 4, HIDDEN)
    for mlp in (plain, divided):
        mlp(hidden).square().sum().backward()
    for weight, other in zip(plain.parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(other.grad, weight.grad, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("features", "shards", "parts"), [(28672, 256, 7), (28672, 1, 4), (29568, 64, 7), (8192, 1, 1)]
)
def test_parts_are_few_and_of_whole_tiles(features: int, shards: int, parts: int) -> None:
    """The 70B's are 448 MiB in bfloat16; over 256 chips each has 112 rows of them, seven tiles."""
    assert feed_forward.count_parts(features, shards, 8192 * features * 2) == parts


def llama(**settings: object) -> PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForSequenceClassification(LlamaConfig(num_attention_heads=2, num_labels=1, **sizes, **settings))


@pytest.mark.parametrize(
    ("name", "is_divided"),
    [
        ("llama", True),
        ("qwen3", True),
        ("gemma3_text", False),  # a norm takes what the block gives
        ("qwen3_moe", False),  # experts and a router
        ("llama with two in one", False),  # parts of its features would not be those of the last product
        ("llama with biases", False),  # the last product's would be added for every part
        ("llama with dropout", False),  # parts would not have the same random numbers
    ],
)
def test_plain_blocks_are_divided(name: str, is_divided: bool) -> None:
    if name.startswith("llama with"):
        model = llama(mlp_bias=name.endswith("biases"))
        if name.endswith("two in one"):
            model.model.layers[0].mlp.gate_proj = nn.Linear(16, 64, bias=False)
        if name.endswith("dropout"):
            model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    else:
        model = family(name, tiny_tokenizer(made_up_pairs(20)["chosen"], vocab_size=320))
    runtime = current()
    runtime.start()
    mesh = MeshShape(fsdp=runtime.device_count())
    runtime.set_mesh(mesh.sizes, mesh.slices)
    plan = plan_model(model, mesh)
    report = place_model(model, plan, runtime, torch.device("xla"))
    for _ in range(2):  # as when the same model is trained again
        divide_feed_forward(model, plan, report.placements, runtime)
    layers = model.model.layers
    divided = [layer.mlp.forward for layer in layers if isinstance(layer.mlp.forward, FeedForward)]
    assert len(divided) == (len(layers) if is_divided else 0)
    assert all(not isinstance(each.whole, FeedForward) for each in divided)
    assert all(len(layer.mlp.down_proj._forward_pre_hooks) == 1 for layer in layers if is_divided)
    assert all(not isinstance(layer.self_attn.forward, FeedForward) for layer in layers)
