"""What a user reads before renting a TPU: does it fit, what limits it, how long it takes at best."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .analytic import Flops, count_flops
from .attention_blocks import kernel_flops
from .case import Case
from .memory import Memory, least_memory
from .program import CompiledProgram
from .roofline import Roofline, compiled_roofline
from .traffic import axes_of, compiled_traffic, least_traffic

UNSEEN = (
    "What compiling ahead of time cannot show: how near the chips come to their published speeds, and how much of the "
    "traffic hides behind arithmetic; other jobs' traffic on shared networks; reading, tokenising and uploading data; "
    "evaluation, checkpoints, logs and restarts. Real steps take longer than these bounds. The first minutes of a run "
    "on the TPU itself are the test."
)


@dataclass(frozen=True)
class Training:
    """How much is trained, and what a chip costs.

    Args:
        pairs: In the dataset; None leaves the hours out.
        epochs: Times that it is gone through.
        price_per_chip_hour: In any currency; None leaves the cost out.
    """

    pairs: int | None = None
    epochs: float = 1.0
    price_per_chip_hour: float | None = None


@dataclass(frozen=True)
class Report:
    """What the compiler says of one case, beside what the case needs at least.

    Args:
        basis: What the lengths of the pairs rest on.
        notes: More to say, such as how a deep program was compiled.
    """

    case: Case
    program: CompiledProgram
    training: Training = Training()
    basis: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def least(self) -> Memory:
        """What the case needs at least: of state what the trainer was seen to keep, the rest by formula."""
        least, traced = least_memory(self.case), self.program
        if not traced.weights:
            return least
        gradients = traced.gradients or least.gradients
        return replace(least, weights=traced.weights, optimizer=traced.optimizer, gradients=gradients)

    @property
    def updated(self) -> int:
        """Bytes of state that the program changes: with several passes a step only the gradients' buffers."""
        return self.least.gradients + (0 if self.case.accumulation > 1 else self.least.optimizer)

    @cached_property
    def flops(self) -> Flops:
        return count_flops(self.case.model, self.case.lengths, self.case.remat)

    @cached_property
    def times(self) -> Roofline:
        return compiled_roofline(self.case, self.program)

    @property
    def flops_compiled(self) -> float:
        """Operations of a pass over all chips: of the program's products, and of its kernels for these pairs."""
        return self.program.flops * self.case.topology.chips + kernel_flops(self.case)

    @property
    def peak(self) -> int:
        """Bytes of a chip's memory that the program takes."""
        return peak_memory(self.program)

    @property
    def free(self) -> int:
        """Bytes that are left; negative if it does not fit."""
        return self.case.topology.chip.memory - self.peak

    @property
    def fits(self) -> bool:
        return self.free >= 0

    def memory_by_kind(self) -> dict[str, int]:
        """Bytes on a chip, in all `peak`. Activations, and gradients without buffers, are by formula."""
        least, program = self.least, self.program
        state = least.weights + least.optimizer
        in_arguments = least.gradients if self.case.accumulation > 1 else 0
        temporary = program.temporary + program.outputs - program.aliased
        activations = min(least.activations, temporary)
        gradients = in_arguments or min(least.gradients, temporary - activations)
        return {
            "weights": least.weights,
            "optimizer": least.optimizer,
            "gradients": gradients,
            "activations": activations,
            "batch and other inputs": program.arguments + program.idle - state - in_arguments,
            "working space": temporary - activations - (0 if in_arguments else gradients),
            "program": program.generated_code,
        }

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes of a pass by axes: compiled, and needed."""
        compiled, least = compiled_traffic(self.program.collectives, self.case.mesh), least_traffic(self.case)
        return {axes: (compiled.get(axes, 0), least.get(axes, 0)) for axes in dict.fromkeys([*least, *compiled])}

    def largest_collectives(self, count: int = 3) -> list[tuple[str, int]]:
        """What sends most in a pass, in words, and its bytes in all executions."""
        sent = sorted(self.program.collectives, key=lambda each: -each.bytes * each.count)[:count]
        return [
            (
                f"{each.count} x {each.kind} {each.dtype}[{','.join(map(str, each.shape))}] over "
                f"{axes_of(each.groups, self.case.mesh) or 'nothing'} {each.op_name}".strip(),
                each.bytes * each.count,
            )
            for each in sent
        ]

    @property
    def hours(self) -> tuple[float, float] | None:
        """Hours for the dataset: if a chip's parts work at once, and in turns."""
        if self.training.pairs is None:
            return None
        pairs = self.training.pairs * self.training.epochs
        return (
            pairs / self.times.most_pairs_per_second / 3600,
            pairs / self.times.pairs_per_second_in_turns / 3600,
        )

    def as_json(self) -> dict[str, Any]:
        """Everything the text says, in bytes, operations and seconds."""
        case, chips = self.case, self.case.topology.chips
        hours = self.hours
        return {
            "topology": str(case.topology),
            "chips": chips,
            "mesh": case.mesh.sizes,
            "remat": case.remat,
            "parameters": case.model.parameters,
            "trained_parameters": case.model.trained_parameters,
            "pairs": case.pairs,
            "rows": case.rows,
            "row_length": case.length,
            "unique_tokens": case.lengths.tokens,
            "fits": self.fits,
            "memory_available": case.topology.chip.memory,
            "memory_peak": self.peak,
            "memory_bound": self.least.bound,
            "memory_by_kind": self.memory_by_kind(),
            "state_bytes": self.least.weights + self.least.optimizer,
            "updated_bytes": self.updated,
            "aliased_bytes": self.program.aliased,
            "flops_compiled": self.flops_compiled,
            "flops_kernels": kernel_flops(case),
            "flops_needed": self.flops.useful,
            "flops_with_remat": self.flops.with_remat,
            "flops_compiled_per_pair": self.flops_compiled / case.pairs,
            "flops_needed_per_pair": self.flops.useful / case.pairs,
            "flops_with_remat_per_pair": self.flops.with_remat / case.pairs,
            "traffic": {
                axes: {"compiled": compiled, "needed": needed} for axes, (compiled, needed) in self.traffic.items()
            },
            "largest_collectives": [list(each) for each in self.largest_collectives(12)],
            "seconds_compute": self.times.compute,
            "seconds_memory": self.times.memory,
            "seconds_links": self.times.links,
            "seconds_step_at_best": self.times.fastest,
            "seconds_step_in_turns": self.times.slowest,
            "mfu_ceiling": self.times.most_mfu,
            "pairs_per_second_at_best": self.times.most_pairs_per_second,
            "pairs_per_second_in_turns": self.times.pairs_per_second_in_turns,
            "hours": hours,
            "chip_hours": hours and [each * chips for each in hours],
            "cost": hours and self.price and [each * chips * self.price for each in hours],
            "compile_seconds": self.program.compile_seconds,
            "largest_buffers": [list(each) for each in self.program.largest_buffers],
            "figures_from": case.topology.chip.source,
            "basis": self.basis,
            "notes": [*self.notes, UNSEEN],
        }

    @property
    def price(self) -> float | None:
        return self.training.price_per_chip_hour


def peak_memory(program: CompiledProgram) -> int:
    """Bytes of a chip's memory at the peak: results in the place of donated arguments take none of their own."""
    results = program.outputs - program.aliased
    return program.arguments + program.idle + results + program.temporary + program.generated_code


__all__ = ["UNSEEN", "Report", "Training", "peak_memory"]
