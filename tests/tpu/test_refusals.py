"""What the real compiler says of programs that are too large is understood, for each kind of chip."""

import re

import pytest

from trl_tpu.parallel.mesh import GiB, parse_topology
from trl_tpu.plan.compile import TracedProgram, compile_for
from trl_tpu.plan.layouts import attempt

SQUARES = """HloModule step
ENTRY %main (x: bf16[{n},1024], y: bf16[1024,{n}]) -> bf16[{n},1024] {{
  %x = bf16[{n},1024] parameter(0)
  %y = bf16[1024,{n}] parameter(1)
  %first = bf16[{n},{n}] dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %bent = bf16[{n},{n}] tanh(%first)
  %second = bf16[{n},{n}] dot(%bent, %bent), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %less = bf16[{n},1024] dot(%second, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %out = bf16[{n},1024] dot(%bent, %less), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""


def of_squares(size: int) -> TracedProgram:
    """A program that needs two arrays of ``size`` x ``size`` numbers at a time."""
    from jaxlib import _jax

    hlo = _jax.hlo_module_from_text(SQUARES.format(n=size)).as_serialized_hlo_module_proto()
    return TracedProgram(hlo, ("{replicated}",) * 2, (False, False), 1)


def refusal(topology: str, size: int) -> str:
    return attempt(None, lambda _: compile_for(of_squares(size), topology)).refusal  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_refusal_says_what_is_needed_and_how_much_memory_there_is(topology: str) -> None:
    memory = parse_topology(topology).chip.memory
    size = int((0.75 * memory / 2) ** 0.5) // 1024 * 1024  # each of the two has three quarters of it
    said = re.fullmatch(r"Used ([\d.]+)G of ([\d.]+)G hbm", refusal(topology, size))
    assert said is not None
    assert float(said[1]) == pytest.approx(2 * 2 * size**2 / GiB, rel=1e-3)
    assert float(said[2]) == pytest.approx(memory / GiB, abs=0.01)


def test_one_array_that_is_too_large_is_refused_in_other_words() -> None:
    size = 131072
    assert f"Allocation (size={2 * size**2}) would exceed memory" in refusal("v5e:2x2", size)
