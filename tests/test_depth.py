"""What two shallow models need, deeper ones need by the layer."""

from dataclasses import replace

import pytest

from trl_tpu.preflight.depth import extrapolate
from trl_tpu.preflight.program import Collective, CompiledProgram


def program(layers: int) -> CompiledProgram:
    """With a fixed part, and one for each layer."""
    gather = Collective("all-gather", 1024, "bf16", (512,), ((0, 1),))
    names = [f"dot.{layer}" for layer in range(layers)]
    table = Collective("all-to-all", 64, "f32", (16,), ((0, 1),), 2, "embedding")
    return CompiledProgram(
        arguments=100 + 7 * layers,
        outputs=90 + 7 * layers,
        aliased=90 + 7 * layers,
        temporary=1000 + 11 * layers,
        generated_code=5 * layers,
        flops=3.0 + 2.5 * layers,
        bytes_accessed=2.0 + layers,
        collectives=(table, *(replace(gather, op_name=name) for name in names)),
        compile_seconds=1.0 + layers,
        largest_buffers=(("f32[8]", 32),),
    )


def test_a_line_through_two_depths_gives_any_other() -> None:
    found, expected = extrapolate(program(2), program(4), (2, 4), 32), program(32)
    for name in ("arguments", "outputs", "aliased", "temporary", "generated_code", "flops", "compile_seconds"):
        assert getattr(found, name) == getattr(expected, name)
    counts = {each.kind: each.count for each in found.collectives}
    assert counts == {"all-gather": 32, "all-to-all": 2}


@pytest.mark.parametrize("depths", [(2, 2), (4, 2), (0, 2), (2, 40)])
def test_depths_have_to_ascend(depths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        extrapolate(program(2), program(4), depths, 32)
