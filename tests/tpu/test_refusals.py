"""Errors of the real compiler for oversized programs are understood for each kind of chip."""

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


def two_large_arrays(size: int) -> TracedProgram:
    """Return a program that needs two arrays of ``size`` x ``size`` numbers at the same time."""
    from jaxlib import _jax

    hlo = _jax.hlo_module_from_text(SQUARES.format(n=size)).as_serialized_hlo_module_proto()
    return TracedProgram(hlo, ("{replicated}",) * 2, (False, False), 1)


def compiler_error(topology: str, size: int) -> str:
    return attempt(None, lambda _: compile_for(two_large_arrays(size), topology)).error  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_out_of_memory_error_gives_required_and_available_memory(topology: str) -> None:
    memory = parse_topology(topology).chip.memory
    size = int((0.75 * memory / 2) ** 0.5) // 1024 * 1024  # each of the two arrays takes three quarters of memory
    said = re.fullmatch(r"Used ([\d.]+)G of ([\d.]+)G hbm", compiler_error(topology, size))
    assert said is not None
    assert float(said[1]) == pytest.approx(2 * 2 * size**2 / GiB, rel=1e-3)
    assert float(said[2]) == pytest.approx(memory / GiB, abs=0.01)


def test_error_for_a_single_oversized_array_is_understood() -> None:
    size = 131072
    assert f"Allocation (size={2 * size**2}) would exceed memory" in compiler_error("v5e:2x2", size)
