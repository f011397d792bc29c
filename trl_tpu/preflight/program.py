"""What the TPU's compiler says of one program. All bytes and FLOPs are per chip."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    kind: str  # "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
    bytes: int  # of its result (for reduce-scatter: of its operand), on one chip
    dtype: str  # "bf16", "f32", ...
    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]  # device numbers that take part together; empty: all
    count: int = 1  # executions a step (inside a loop: its trip count)
    op_name: str = ""  # the metadata's op_name, for explaining


@dataclass(frozen=True)
class CompiledProgram:
    """A program for one chip of those that run it together.

    Args:
        arguments: Bytes, as are ``outputs``, ``aliased`` (outputs in the place of donated arguments), ``temporary``
            and ``generated_code``.
        flops: Operations of matrix products, see `counts.flops_of`.
        bytes_accessed: Read from the chip's memory and written to it, see `counts.memory_traffic`.
        weights: Bytes, as are ``optimizer`` and ``gradients``, which are buffers to add up in: what stays on the chip
            from step to step, as traced.
        idle: Bytes of it that this program does not take.
        largest_buffers: As "f32[16,2048,2048] all-gather ...", and their bytes, for explaining.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    generated_code: int
    flops: float
    bytes_accessed: float
    collectives: tuple[Collective, ...]
    compile_seconds: float
    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    idle: int = 0
    largest_buffers: tuple[tuple[str, int], ...] = ()
