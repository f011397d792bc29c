"""The mesh's arithmetic, and that every refusal shows the equation and meshes that work."""

import re
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_tpu.parallel.mesh import AXES, MeshShape, parse_mesh

counts = st.integers(1, 512)


@settings(deadline=None)
@given(counts, counts)
def test_the_product_is_the_number_of_devices_and_minus_one_fills(data: int, fsdp: int) -> None:
    devices = data * fsdp
    shape = MeshShape(data=data, fsdp=fsdp)
    for spec in (
        f"data={data},fsdp={fsdp}",
        f" fsdp = {fsdp} , data={data}",
        f"data=-1,fsdp={fsdp}",
        f"data={data},fsdp=-1",
    ):
        assert parse_mesh(spec, devices) == shape
    assert shape.devices == prod(shape.sizes.values()) == shape.batch_shards == devices
    assert tuple(shape.sizes) == shape.batch_axes == AXES
    assert parse_mesh(str(shape), devices) == shape


@settings(deadline=None)
@given(counts)
def test_an_axis_that_is_not_named_has_size_one(devices: int) -> None:
    assert parse_mesh("fsdp=-1", devices) == MeshShape(fsdp=devices)
    assert parse_mesh("data=-1", devices) == MeshShape(data=devices)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), counts)
def test_sizes_that_do_not_multiply_show_the_equation_and_meshes_that_work(data: int, fsdp: int, devices: int) -> None:
    if data * fsdp == devices:
        devices += 1
    with pytest.raises(ValueError) as caught:
        parse_mesh(f"data={data},fsdp={fsdp}", devices)
    message = str(caught.value)
    assert f"data={data} x fsdp={fsdp} is {data * fsdp} and there are {devices}" in message
    assert_works(message, devices)


@settings(deadline=None)
@given(st.integers(2, 64), counts)
def test_a_size_that_does_not_divide_the_devices_shows_the_fraction(data: int, devices: int) -> None:
    if devices % data == 0:
        devices += 1
    with pytest.raises(ValueError) as caught:
        parse_mesh(f"data={data},fsdp=-1", devices)
    assert f"leaves {devices}/{data}, no whole number, for fsdp" in str(caught.value)
    assert_works(str(caught.value), devices)


def assert_works(message: str, devices: int) -> None:
    offered = re.findall(r"data=\d+,fsdp=\d+|'fsdp=-1'", message.partition("Meshes that work:")[2])
    assert len(offered) >= 2
    for spec in offered:
        assert parse_mesh(spec.strip("'"), devices).devices == devices


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("", "'' is not of the form axis=size; write e.g. 'fsdp=-1'"),
        ("8", "'8' is not of the form axis=size"),
        ("data=2,", "'' is not of the form axis=size"),
        ("fsdp:8", "'fsdp:8' is not of the form axis=size"),
        ("fdsp=8", "unknown axis 'fdsp'; the axes are data, fsdp. Did you mean 'fsdp'?"),
        ("dta=2,fsdp=4", "unknown axis 'dta'; the axes are data, fsdp. Did you mean 'data'?"),
        ("expert=8", "unknown axis 'expert'; the axes are data, fsdp."),
        ("fsdp=2,fsdp=4", "axis 'fsdp' is given twice"),
        ("data=-1,fsdp=-1", "only one axis can be -1, not data and fsdp"),
        ("fsdp=0", "the size of 'fsdp' must be a positive integer, or -1"),
        ("fsdp=-2", "the size of 'fsdp' must be a positive integer, or -1"),
        ("fsdp=2.5", "the size of 'fsdp' must be a positive integer, or -1"),
        ("fsdp=", "the size of 'fsdp' must be a positive integer, or -1"),
        ("fsdp=--1", "the size of 'fsdp' must be a positive integer, or -1"),
        ("fsdp=²", "the size of 'fsdp' must be a positive integer, or -1"),
    ],
)
def test_what_is_no_mesh_is_refused_by_name(spec: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        parse_mesh(spec, 8)
    assert str(caught.value).startswith(f"mesh {spec!r}: ")
