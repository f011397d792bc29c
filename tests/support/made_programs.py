"""Programs as a good compiler would make them, for tests of what is said about them."""

import dataclasses
from typing import Any

from trl_tpu.parallel.chips import GiB
from trl_tpu.plan.case import Case
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.needs import least_memory

# what libtpu 0.0.21 said of programs for v6e, and of one for v5e with an array that is larger than the memory
REFUSAL = """jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 49.22G of 31.25G hbm. Exceeded hbm capacity by 17.97G.

Total hbm usage >= 49.47G:
    reserved        260.00M
    program          49.22G
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement 49.22G:
    HLO temp         49.22G (100.0% utilization: Unpadded (49.22G) Padded (49.22G), 0.0% fragmentation (0B))
"""
ARGUMENTS_REFUSED = """jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of \
memory in memory space hbm. Used 8.58G of 7.81G hbm. Exceeded hbm capacity by 786.01M.

Total hbm usage >= 8.83G:
    reserved        260.01M
    program           3.34G
    arguments         5.24G

Output size 5.24G; shares 5.24G with arguments.
"""
ONE_ARRAY_REFUSED = (
    "jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Allocation (size=80025600000) would exceed memory "
    "(size=17179869184) :: #allocation6 [shape = 'bf16[200000,200000]{1,0:T(8,128)(2,1)}', space=hbm, "
    "size = 0xffffffffffffffff, tag = 'output of convolution_tanh_fusion@{}'] :: <no-hlo-instruction>"
)


def compiled(case: Case, **changes: Any) -> CompiledProgram:
    """What a good compiler would say of ``case``."""
    least = least_memory(case)
    program = CompiledProgram(
        arguments=least.weights + least.optimizer + 1000,
        results=10,
        aliased=least.weights + least.optimizer,
        temporary=least.gradients + least.activations + GiB,
        generated_code=2**20,
        flops=1e14,
        bytes_moved=1e11,
        compile_seconds=12.0,
        received={"fsdp": {"all-gather bf16[512,256]": 30e9}} if case.mesh.devices > 1 else {},
        state={"weight": least.weights, "optimizer": least.optimizer},
    )
    return dataclasses.replace(program, **changes)
