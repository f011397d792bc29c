"""The mesh's arithmetic, and that every refusal shows the equation."""

import re
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trl_tpu.parallel.mesh import AXES, BATCH_AXES, MeshShape, check_heads, parse_mesh

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
    assert tuple(shape.sizes) == AXES == (*BATCH_AXES, "tensor")
    assert parse_mesh(str(shape), devices) == shape


@given(counts)
def test_an_axis_that_is_not_named_has_size_one(devices: int) -> None:
    for axis in AXES:
        assert parse_mesh(f"{axis}=-1", devices) == MeshShape(**{axis: devices})


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


@given(counts, counts, counts, st.integers(1, 512))
def test_sizes_that_do_not_multiply_show_the_equation(data: int, fsdp: int, tensor: int, devices: int) -> None:
    assume(data * fsdp * tensor != devices)
    with pytest.raises(ValueError) as caught:
        parse_mesh(f"data={data},fsdp={fsdp},tensor={tensor}", devices)
    message = str(caught.value)
    product = data * fsdp * tensor
    assert f"data={data} x fsdp={fsdp} x tensor={tensor} is {product} and there are {devices}" in message


@given(st.integers(2, 64), st.integers(1, 512))
def test_a_size_that_does_not_divide_the_devices_shows_the_fraction(tensor: int, devices: int) -> None:
    assume(devices % tensor)
    with pytest.raises(ValueError) as caught:
        parse_mesh(f"fsdp=-1,tensor={tensor}", devices)
    message = str(caught.value)
    assert f"data=1 x fsdp=-1 x tensor={tensor} leaves {devices}/{tensor}, no whole number, for fsdp" in message


@pytest.mark.parametrize(
    ("spec", "devices", "text"),
    [
        ("slices=2,data=3,fsdp=2", 6, "`data` also goes over the slices, and data=3 / slices=2 is no whole number"),
        ("slices=3,data=-1", 8, "data=8 / slices=3 is no whole number"),
        ("slices=2,fsdp=-1", 9, "data=2 x fsdp=-1 x tensor=1 leaves 9/2"),
    ],
)
def test_slices_that_do_not_divide_are_refused(spec: str, devices: int, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_mesh(spec, devices)


def test_a_tensor_axis_that_cuts_heads_is_refused_with_the_equation() -> None:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
    for tensor in (1, 2, 4):
        check_heads(MeshShape(fsdp=8 // tensor, tensor=tensor), heads)
    with pytest.raises(ValueError) as caught:
        check_heads(MeshShape(fsdp=2, tensor=8), heads)
    message = str(caught.value)
    assert message.startswith("mesh 'data=1,fsdp=2,tensor=8': `tensor` gives each device whole attention heads")
    assert "num_key_value_heads=4 / tensor=8 is no whole number" in message


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("", "'' is not AXIS=SIZE"),
        ("fsdp:8", "'fsdp:8' is not AXIS=SIZE"),
        ("fdsp=8", "'fdsp=8' is not AXIS=SIZE, once for each axis: the axes are data, fsdp, tensor"),
        ("fsdp=2,fsdp=4", "'fsdp=4' is not AXIS=SIZE, once for each axis"),
        ("data=-1,fsdp=-1", "only one axis can be -1, not data and fsdp"),
        ("fsdp=0", "'fsdp=0' is not AXIS=SIZE, once for each axis: the axes are data, fsdp, tensor, and a size is a"),
        ("fsdp=2.5", "'fsdp=2.5' is not AXIS=SIZE"),
        ("fsdp=²", "'fsdp=²' is not AXIS=SIZE"),
        ("slices=-1", "'slices=-1' is not AXIS=SIZE"),
    ],
)
def test_what_is_no_mesh_is_refused_by_name(spec: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        parse_mesh(spec, 8)
    assert str(caught.value).startswith(f"mesh {spec!r}: ")
