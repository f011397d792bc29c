"""Workloads to plan, and programs as a good compiler would make them, for tests of what is said about them."""

import dataclasses
from typing import Any

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.packing.lengths import PairLengths
from trl_tpu.parallel.chips import GiB
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.needs import least_memory
from trl_tpu.plan.workload import Layout, Workload

# what libtpu 0.0.21 said of programs for v6e
REFUSAL = """jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 49.22G of 31.25G hbm. Exceeded hbm capacity by 17.97G.

Total hbm usage >= 49.47G:
    reserved        260.00M
    program          49.22G
    arguments            0B
"""


def workload(module: Any, lengths: PairLengths, tokens: Any = None, **settings: Any) -> Workload:
    """A workload that computes in bfloat16, on whatever device."""
    args = RewardConfig("unused", report_to="none", use_cpu=True, bf16=True, **settings)
    return Workload(module, args, lengths, tokens)


def compiled(layout: Layout, **changes: Any) -> CompiledProgram:
    """What a good compiler would say of ``layout``."""
    least = least_memory(layout)
    program = CompiledProgram(
        arguments=least.weights + least.optimizer + 1000,
        results=10,
        temporary=least.gradients + least.activations + GiB,
        generated_code=2**20,
    )
    return dataclasses.replace(program, **changes)
