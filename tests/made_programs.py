"""Programs as a good compiler would make them, for tests of what is said about them."""

import dataclasses
from typing import Any

from trl_tpu.preflight.case import Case
from trl_tpu.preflight.chips import GiB
from trl_tpu.preflight.memory import least_memory
from trl_tpu.preflight.program import Collective, CompiledProgram

REFUSAL = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 41.50G of "
    "31.25G hbm. Exceeded hbm capacity by 10.25G."
)


def compiled(case: Case, **changes: Any) -> CompiledProgram:
    """What a good compiler would say of ``case``."""
    least = least_memory(case)
    state = least.weights + least.optimizer
    program = CompiledProgram(
        arguments=state + 1000,
        outputs=state + 10,
        aliased=state,
        temporary=least.gradients + least.activations + GiB,
        generated_code=2**20,
        flops=1e14,
        bytes_accessed=1e11,
        collectives=(Collective("all-gather", 16 * 10**9, "bf16", (1,), (), count=2),),
        compile_seconds=12.0,
    )
    return dataclasses.replace(program, **changes)
