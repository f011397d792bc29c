"""The step that the trainer runs, as a program for a mesh of any size, without weights, data or devices.

The trainer itself is run, with placeholders in the place of weights and batches: see `trl_tpu.plan.placeholder`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .apart import call_apart

if TYPE_CHECKING:  # a process that compiles reads this module too, and needs no model
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class StepRequest:
    """What to trace.

    Args:
        model: A model's config; no weights are read.
        chips: In the mesh.
        length: Columns of each row.
        rows: Packed rows, over which the pairs of a batch are dealt out evenly; None pads, two rows to a pair.
        arguments: Of `RewardConfig`, its batch size and mesh among them.
        peft: A `peft.LoraConfig`; None trains the whole model.
        dtype: The weights', as torch names it.
    """

    model: "PretrainedConfig"
    chips: int
    length: int
    rows: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    peft: Any = None
    dtype: str = "float32"


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch_xla records it, before any compiler.

    Args:
        hlo: A serialized HloModuleProto.
        shardings: How each of its arguments is laid out, in HLO's words.
        donated: Whether the memory of each goes to a result.
        mesh: The sizes of the mesh's axes.
        state: Bytes on one chip of what stays there from step to step: "weight", "optimizer" and "gradient" (buffers
            to accumulate in).
        idle: Bytes of it that only other programs of the step take.
    """

    hlo: bytes
    shardings: tuple[str, ...]
    donated: tuple[bool, ...]
    chips: int
    mesh: Mapping[str, int]
    state: Mapping[str, int]
    idle: int = 0


def trace_step(request: StepRequest) -> TracedProgram:
    """The program that goes over a batch: a whole step, or with `gradient_accumulation_steps` a micro-batch.

    Raises:
        RuntimeError: If the trainer refuses the request; with what it says.
    """
    environment = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(min(request.chips, 2)),  # where there is one, nothing is sharded
        "USE_TORCH_XLA": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return call_apart("trace_child:trace_here", request, environment=environment)
