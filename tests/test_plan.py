"""Where parameters go: along their largest divisible dimension, or whole with a reason; and the bytes add up."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer
from torch import nn

from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.parallel.plan import plan_parameters
from trl_tpu.parallel.shard import ShardReport, shard_model
from trl_tpu.runtime import Axes
from trl_tpu.runtime.native import NativeRuntime


class RecordingRuntime(NativeRuntime):
    """Plain torch that notes how it is asked to shard."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, Axes]] = []

    def shard(self, tensor: torch.Tensor, axes: Axes) -> None:
        self.asked.append((tensor, axes))


shapes = st.lists(st.integers(1, 40), max_size=4).map(tuple)


@settings(deadline=None)
@given(shapes, st.integers(2, 16))
def test_one_largest_divisible_dimension_is_split_and_the_first_of_equals(shape: tuple[int, ...], fsdp: int) -> None:
    placement = plan_parameters({"w": shape}, MeshShape(fsdp=fsdp))["w"]
    assert len(placement.axes) == len(shape)
    divisible = [size for size in shape if size % fsdp == 0]
    assert placement.is_sharded == bool(divisible)
    if divisible:
        split = placement.axes.index("fsdp")
        assert placement.axes == tuple("fsdp" if dim == split else None for dim in range(len(shape)))
        assert split == shape.index(max(divisible))
    else:
        assert placement.axes == (None,) * len(shape)
        assert placement.reason == f"no dimension of {list(shape)} is divisible by fsdp={fsdp}"


@settings(deadline=None)
@given(shapes, st.integers(1, 8))
def test_the_data_axis_splits_no_parameter(shape: tuple[int, ...], data: int) -> None:
    placement = plan_parameters({"w": shape}, MeshShape(data=data))["w"]
    assert placement.axes == (None,) * len(shape)
    assert placement.reason == "fsdp=1"


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(fsdp=8), MeshShape(data=2, fsdp=4), MeshShape(data=8)])
def test_bytes_add_up_and_the_runtime_is_asked_for_every_parameter_once(mesh: MeshShape) -> None:
    model = tiny_model(tiny_tokenizer(["some text"], vocab_size=300))
    recorder = RecordingRuntime()
    report = shard_model(model, mesh, recorder)
    parameters = dict(model.named_parameters())
    assert [id(tensor) for tensor, _ in recorder.asked] == [id(tensor) for tensor in parameters.values()]
    on_a_device = 0
    for tensor, axes in recorder.asked:
        parts = prod(mesh.sizes[axis] for axis in axes if isinstance(axis, str))
        assert tensor.numel() % parts == 0
        on_a_device += tensor.numel() * 4 // parts
    assert report.total_bytes == sum(tensor.numel() * 4 for tensor in parameters.values())
    assert report.bytes_per_device == on_a_device
    assert report.replicated_bytes == (report.total_bytes if mesh.fsdp == 1 else 0)


def test_the_report_names_what_stays_whole_its_bytes_and_why() -> None:
    model = nn.Sequential(nn.Linear(64, 1024, bias=False), nn.Linear(1024, 5))
    report = shard_model(model, MeshShape(data=2, fsdp=4), RecordingRuntime())
    assert {name: placement.axes for name, placement in report.placements.items()} == {
        "0.weight": ("fsdp", None),
        "1.weight": (None, "fsdp"),
        "1.bias": (None,),
    }
    assert report.replicated_bytes == 5 * 4
    assert str(report).splitlines() == [
        "mesh data=2,fsdp=4 on 8 device(s): parameters take 0.07 MiB a device of 0.27 MiB in all",
        "  sharded over fsdp: 2 of 3 parameters",
        "  replicated: 1.bias (0.00 MiB; no dimension of [5] is divisible by fsdp=4)",
    ]


def test_bytes_follow_the_type_and_tied_parameters_count_once() -> None:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(8, 16), "head": nn.Linear(16, 8, bias=False)}).to(torch.bfloat16)
    model["head"].weight = model["embed"].weight
    report = shard_model(model, MeshShape(fsdp=8), RecordingRuntime())
    assert list(report.sizes) == ["embed.weight"]
    assert report.total_bytes == 8 * 16 * 2
    assert report.bytes_per_device == 16 * 2


def test_bytes_on_a_device_round_nothing_away() -> None:
    placements = plan_parameters({"a": (8, 3), "b": (7,)}, MeshShape(fsdp=4))
    report = ShardReport(MeshShape(fsdp=4), placements, {"a": 8 * 3 * 4, "b": 7 * 4})
    assert report.bytes_per_device == 8 * 3 * 4 // 4 + 7 * 4
