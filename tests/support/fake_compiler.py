"""A fake TPU compiler for tests of `trl-tpu plan`: its programs, an error, and the layouts it is given."""

import dataclasses
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trl_tpu.parallel.mesh import GiB
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.layouts import Layout
from trl_tpu.scripts import plan

# error of libtpu 0.0.21 for a program on v6e
OOM_ERROR = """jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 49.22G of 31.25G hbm. Exceeded hbm capacity by 17.97G.

Total hbm usage >= 49.47G:
    reserved        260.00M
    program          49.22G
    arguments            0B
"""


def save_config(folder: Path) -> None:
    """Save the config of a small model, without weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    AutoConfig.for_model("llama", num_attention_heads=4, **sizes).save_pretrained(folder)


def compiled(_: Layout, **changes: Any) -> CompiledProgram:
    """Return a program that fits in memory and needs 0.01 s for communication."""
    program = CompiledProgram(2 * GiB, 10, GiB, 2**20, flops=1e12, received=4e9)
    return dataclasses.replace(program, **changes)


def layouts_of(*words: str) -> list[Layout]:
    """Return the layouts that the command ``trl-tpu plan`` compiles."""
    seen: list[Layout] = []

    def compile_layout(layout: Layout) -> CompiledProgram:
        seen.append(layout)
        return compiled(layout)

    assert plan.run([*words, "--report_to", "none"], compile_one=compile_layout) == 0
    return seen
