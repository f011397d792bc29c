"""Topologies are read, or refused with those that work."""

import pytest

from trl_tpu.parallel.mesh import parse_topology


@pytest.mark.parametrize(("text", "chips"), [("v5e:2x4", 8), ("v5p:4x8x8", 256), ("v6e:4x4", 16), ("V6E:1x1", 1)])
def test_a_topology_has_the_product_of_its_sides_as_chips(text: str, chips: int) -> None:
    topology = parse_topology(text)
    assert topology.chips == chips
    assert str(topology) == text.lower()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v4:2x2x1", "with a chip of v5e, v5p, v6e"),
        ("v6e:3x3", "slices of v6e have the shapes 1x1, 2x2, 2x4, 4x4"),
    ],
)
def test_what_no_slice_is_called_is_refused_with_what_works(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_topology(text)


def test_one_chip_is_compiled_as_one_of_the_smallest_slice_that_libtpu_knows() -> None:
    assert parse_topology("v5e:1x1").compiled_as == "v5e:2x2"
    assert parse_topology("v5p:2x2x1").compiled_as == "v5p:2x2x1"
