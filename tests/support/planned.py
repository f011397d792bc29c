"""Layouts to plan, and programs as the compiler might make them, for tests of what is said about them."""

import dataclasses
from typing import Any

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.packing.shapes import PairLengths
from trl_tpu.parallel.mesh import GiB, MeshShape, parse_topology
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.layouts import Layout
from trl_tpu.runtime import Remat

# what libtpu 0.0.21 said of programs for v6e
REFUSAL = """jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 49.22G of 31.25G hbm. Exceeded hbm capacity by 17.97G.

Total hbm usage >= 49.47G:
    reserved        260.00M
    program          49.22G
    arguments            0B
"""


def layout_of(
    module: Any, lengths: PairLengths, tokens: Any = None, *, mesh: MeshShape, pairs: int, **settings: Any
) -> Layout:
    """A layout on v6e, as many chips as the mesh has, full remat."""
    args = RewardConfig("unused", report_to="none", use_cpu=True, bf16=True, **settings)
    shape = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}[mesh.devices]
    return Layout(module, args, lengths, tokens, parse_topology(f"v6e:{shape}"), mesh, Remat.FULL, pairs)


def compiled(_: Layout, **changes: Any) -> CompiledProgram:
    """A program that fits, in which links need a hundredth of a second."""
    program = CompiledProgram(2 * GiB, 10, GiB, 2**20, flops=1e12, received=4e9)
    return dataclasses.replace(program, **changes)
