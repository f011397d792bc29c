"""Layouts to plan, and programs as the compiler might make them, for tests of what is said about them."""

import dataclasses
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trl_tpu.parallel.mesh import GiB
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.layouts import Layout
from trl_tpu.scripts import plan

# what libtpu 0.0.21 said of programs for v6e
REFUSAL = """jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 49.22G of 31.25G hbm. Exceeded hbm capacity by 17.97G.

Total hbm usage >= 49.47G:
    reserved        260.00M
    program          49.22G
    arguments            0B
"""


def save_config(folder: Path) -> None:
    """A small model that is nothing but a config."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    AutoConfig.for_model("llama", num_attention_heads=4, **sizes).save_pretrained(folder)


def compiled(_: Layout, **changes: Any) -> CompiledProgram:
    """A program that fits, in which links need a hundredth of a second."""
    program = CompiledProgram(2 * GiB, 10, GiB, 2**20, flops=1e12, received=4e9)
    return dataclasses.replace(program, **changes)


def layouts_of(*words: str) -> list[Layout]:
    """What the command ``trl-tpu plan`` compiles."""
    seen: list[Layout] = []

    def compile_layout(layout: Layout) -> CompiledProgram:
        seen.append(layout)
        return compiled(layout)

    assert plan.main([*words, "--report_to", "none"], compile_layout) == 0
    return seen
