"""Attention in expanded rows on XLA equals plain torch, and each device attends only to its own rows."""

import re

import pytest
import torch
import torch_xla
from decoders import KNOWN_PAIRS, gradients, in_rows, packed, random_decoder

from trl_tpu import runtime
from trl_tpu.modeling.static_shapes import ExpandedAttention, ExpandedRows, use_expanded_attention
from trl_tpu.packing.shapes import BatchShape
from trl_tpu.parallel.mesh import MeshShape


@pytest.fixture(scope="module")
def devices() -> int:
    current = runtime.current()
    current.set_mesh(MeshShape(fsdp=current.topology().devices).sizes, 1)
    return current.topology().devices


def test_rewards_and_gradients_equal_plain_torchs(devices: int) -> None:
    rows = in_rows(KNOWN_PAIRS, BatchShape(8, 64))
    model = random_decoder("Mistral, sliding window")
    use_expanded_attention(model)
    expected = packed(model, rows, expand=True)
    theirs = gradients(model, expected)
    model.to("xla")
    rewards = packed(model, rows, expand=True, device="xla")
    ours = gradients(model, rewards)
    values = runtime.current().fetch([rewards, *ours.values()])
    assert ours.keys() == theirs.keys()
    # norms compute in float32, with different rounding on the two
    for found, wanted in zip(values, [expected, *theirs.values()], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.eight
def test_devices_gather_only_from_their_own_rows(devices: int) -> None:
    """XLA's partitioner does not detect that rows are independent and would copy every row to every device."""

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        axes = (("data", "fsdp"), *(None,) * (tensor.dim() - 1))
        return runtime.current().place(tensor, axes, torch_xla.device())

    length, rows = 32, 16
    torch.manual_seed(0)
    expand = torch.arange(length, dtype=torch.int32).expand(rows, 2, length).contiguous()
    home = torch.stack([expand[:, 0], torch.full_like(expand[:, 0], -1)], dim=1)
    places = ExpandedRows(expand, torch.ones_like(expand), home, expand[:, 0].contiguous())
    q, k, v = (torch.randn(rows, heads, length, 4) for heads in (4, 2, 2))

    def attend(places: ExpandedRows, *qkv: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in qkv]
        output, _ = ExpandedAttention(places, 7).attend(None, torch.nn.Identity(), *leaves)
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    results = attend(ExpandedRows(*map(on_device, places)), *map(on_device, (q, k, v)))
    hlo = torch_xla._XLAC._get_xla_tensors_hlo(results)
    found = runtime.current().fetch(results)
    for ours, theirs in zip(found, attend(places, q, k, v), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    moved = re.findall(r"= \w+\[(\d+),[^\]]*\]\S* (?:gather|scatter)\(", hlo)
    assert len(moved) >= 6
    own_places = rows // devices * length
    assert set(map(int, moved)) == {own_places, 2 * own_places}
