"""Meshes and topologies are read, or rejected with the equation or with what works."""

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.errors import UserError
from trl_tpu.parallel.mesh import AXES, BATCH_AXES, MeshShape, parse_mesh, parse_topology

counts = st.integers(1, 16)


@given(counts, counts, counts)
def test_the_product_is_the_number_of_devices_and_minus_one_fills(data: int, fsdp: int, tensor: int) -> None:
    devices = data * fsdp * tensor
    shape = MeshShape(data, fsdp, tensor)
    for spec in (
        f"data={data},fsdp={fsdp},tensor={tensor}",
        f" tensor={tensor}, fsdp = {fsdp} , data={data}",
        f"data=-1,fsdp={fsdp},tensor={tensor}",
        f"data={data},fsdp=-1,tensor={tensor}",
        f"data={data},fsdp={fsdp},tensor=-1",
    ):
        assert parse_mesh(spec, devices) == shape
    assert shape.devices == prod(shape.sizes.values()) == shape.batch_shards * tensor == devices
    assert parse_mesh("tensor=-1", devices) == MeshShape(tensor=devices)  # axes without a name have size 1
    assert tuple(shape.sizes) == AXES == (*BATCH_AXES, "tensor")
    assert parse_mesh(str(shape), devices) == shape


@given(counts, counts, counts, st.integers(1, 4))
def test_slices_are_the_outer_part_of_data(within: int, fsdp: int, tensor: int, slices: int) -> None:
    data = slices * within
    devices = data * fsdp * tensor
    shape = MeshShape(data, fsdp, tensor, slices)
    assert parse_mesh(f"slices={slices},data={data},fsdp={fsdp},tensor={tensor}", devices) == shape
    assert parse_mesh(f"data={data},fsdp={fsdp},tensor={tensor}", devices, slices) == shape  # found by the runtime
    assert parse_mesh(f"slices={slices},fsdp=-1", devices) == MeshShape(slices, devices // slices, 1, slices)
    assert parse_mesh(f"slices={slices},data=-1", devices) == MeshShape(devices, 1, 1, slices)
    assert parse_mesh(str(shape), devices) == shape


@pytest.mark.parametrize(
    ("spec", "devices", "rule"),
    [
        # sizes that do not multiply to the devices: the message shows the equation
        ("data=2,fsdp=3", 8, "8, but are data=2 x fsdp=3 x tensor=1"),
        ("fsdp=-1,tensor=3", 8, "8, but are data=1 x fsdp=-1 x tensor=3"),
        ("slices=2,fsdp=-1", 9, "9, but are data=2 x fsdp=-1 x tensor=1"),
        ("slices=2,data=3,fsdp=2", 6, "data=3 / slices=2"),
        ("slices=3,data=-1", 8, "data=8 / slices=3"),
        ("data=-1,fsdp=-1", 8, "8, but are data=-1 x fsdp=-1"),
        *((spec, 8, "is not AXIS=SIZE") for spec in ("", "fsdp:8", "fdsp=8", "fsdp=2,fsdp=4", "fsdp=0", "fsdp=2.5")),
        *((spec, 8, "is not AXIS=SIZE") for spec in ("fsdp=²", "slices=-1")),
    ],
)
def test_a_wrong_mesh_is_rejected_with_its_text(spec: str, devices: int, rule: str) -> None:
    with pytest.raises(UserError, match=re.escape(rule)) as caught:
        parse_mesh(spec, devices)
    assert str(caught.value).startswith(f"mesh {spec!r}: ")


@pytest.mark.parametrize(
    ("text", "chips", "compiled_as"),
    [("v5e:2x4", 8, "v5e:2x4"), ("v5p:4x8x8", 256, "v5p:4x8x8"), ("V6E:1x1", 1, "v6e:2x2")],
)
def test_a_topology_is_read(text: str, chips: int, compiled_as: str) -> None:
    """libtpu knows no slice of one chip: one of the smallest slice stands for it."""
    topology = parse_topology(text)
    assert (topology.chips, str(topology), topology.compiled_as) == (chips, text.lower(), compiled_as)


@pytest.mark.parametrize(("text", "works"), [("v4:2x2x1", "v5e, v5p, v6e"), ("v6e:3x3", "1x1, 2x2, 2x4, 4x4")])
def test_an_unknown_topology_is_rejected_with_what_works(text: str, works: str) -> None:
    with pytest.raises(UserError, match=works):
        parse_topology(text)
