"""What a user reads before renting a TPU, as numbers: does it fit, what limits it, how long it takes at best."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .case import Case
from .compile import CompiledProgram
from .needs import Flops, Memory, least_memory, least_traffic, needed_flops

UNSEEN = (
    "What compiling ahead of time cannot show: how near the chips come to their published speeds, and how much of the "
    "traffic hides behind arithmetic; other jobs' traffic on shared networks; reading, tokenizing and uploading data; "
    "evaluation, checkpoints, logs and restarts. Real steps take longer than these bounds. The first minutes of a run "
    "on the TPU itself are the test."
)


@dataclass(frozen=True)
class Report:
    """What the compiler says of one case, beside what the case needs at least.

    Args:
        pairs_to_train: All of the training, each as often as it is gone through; None leaves the hours out.
        price_per_chip_hour: In any currency; None leaves the cost out.
    """

    case: Case
    program: CompiledProgram
    pairs_to_train: float | None = None
    price_per_chip_hour: float | None = None

    # ---- memory

    @cached_property
    def least(self) -> Memory:
        return least_memory(self.case)

    @property
    def fits(self) -> bool:
        return self.program.peak <= self.case.available

    @cached_property
    def memory_by_kind(self) -> dict[str, int]:
        """Bytes on a chip, in all the program's peak. Activations, and gradients without buffers, are by formula."""
        program, state = self.program, self.program.state
        temporary = program.temporary + program.results
        activations = min(self.least.activations, temporary)
        buffers = state.get("gradient", 0)
        gradients = 0 if buffers else min(self.least.gradients, temporary - activations)
        return {
            "weights": state["weight"],
            "optimizer": state["optimizer"],
            "gradients": buffers or gradients,
            "activations": activations,
            "batch and other inputs": program.arguments + program.idle - sum(state.values()),
            "working space": temporary - activations - gradients,
            "program": program.generated_code,
        }

    # ---- work

    @cached_property
    def flops(self) -> Flops:
        return needed_flops(self.case)

    @property
    def flops_compiled(self) -> float:
        """Operations of a pass over all chips: as the compiler counts them, and those of attention kernels."""
        return self.program.flops * self.case.topology.chips + self.flops.kernels

    @cached_property
    def traffic(self) -> dict[str, dict[str, float]]:
        """Bytes that a chip receives in a pass, by mesh axes: compiled, and needed."""
        least, received = least_traffic(self.case), self.program.received
        return {
            axes: {"compiled": sum(received.get(axes, {}).values()), "needed": least.get(axes, 0)}
            for axes in dict.fromkeys([*least, *received])
        }

    @property
    def largest_collectives(self) -> list[tuple[str, float]]:
        """What sends most in a pass, in words, and the bytes of it that a chip receives."""
        received = self.program.received.items()
        sent = [(f"{what} over {axes}", size) for axes, sizes in received for what, size in sizes.items()]
        return sorted(sent, key=lambda each: -each[1])

    # ---- time: the roofline model, https://doi.org/10.1145/1498765.1498785

    @cached_property
    def seconds(self) -> dict[str, float]:
        """What a pass takes each part of a chip at its published speed."""
        flops = self.program.flops + self.flops.kernel_units / self.case.topology.chips
        received = sum(each["compiled"] for each in self.traffic.values())
        return seconds_of(self.case, flops, self.program.bytes_moved, received)

    @property
    def bounds(self) -> tuple[float, float]:
        """Seconds of a pass: at best, if all parts work at the same time, and if they take turns.

        The second is no upper limit: nothing works at its published speed.
        """
        return max(self.seconds.values()), sum(self.seconds.values())

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    @property
    def pairs_per_second(self) -> tuple[float, float]:
        """If a chip's parts work at once, and in turns."""
        at_best, in_turns = self.bounds
        return self.case.pairs / at_best, self.case.pairs / in_turns

    @property
    def mfu(self) -> float:
        """The ceiling on model FLOPs utilization."""
        return self.flops.needed / self.case.topology.chips / self.case.topology.chip.peak_flops / self.bounds[0]

    @property
    def hours(self) -> tuple[float, ...]:
        """Hours of the training, if its pairs are known: if a chip's parts work at once, and in turns."""
        return tuple(self.pairs_to_train / rate / 3600 for rate in self.pairs_per_second if self.pairs_to_train)

    @property
    def chip_hours(self) -> tuple[float, ...]:
        return tuple(each * self.case.topology.chips for each in self.hours)

    @property
    def cost(self) -> tuple[float, ...]:
        return tuple(each * self.price_per_chip_hour for each in self.chip_hours if self.price_per_chip_hour)

    def as_json(self) -> dict[str, Any]:
        """Everything the text says, in bytes, operations and seconds."""
        case, program, model = self.case, self.program, self.case.job.model
        return case.as_json() | {
            "chips": case.topology.chips,
            "parameters": {"all": model.parameters, "trained": model.trained_parameters},
            "unique_tokens": case.lengths.tokens,
            "fits": self.fits,
            "memory": {"available": self.case.available, "peak": program.peak, "bound": self.least.bound},
            "memory_by_kind": self.memory_by_kind,
            "largest_buffers": program.largest_buffers,
            "flops": vars(self.flops) | {"compiled": self.flops_compiled},
            "traffic": self.traffic,
            "largest_collectives": self.largest_collectives[:12],
            "seconds": self.seconds,
            "bounds": self.bounds,
            "limit": self.limit,
            "mfu_ceiling": self.mfu,
            "pairs_per_second": self.pairs_per_second,
            "hours": self.hours,
            "chip_hours": self.chip_hours,
            "cost": self.cost,
            "compile_seconds": program.compile_seconds,
            "figures_from": case.topology.chip.source,
            "basis": case.job.basis,
            "notes": [*case.job.notes, UNSEEN],
        }


def seconds_of(case: Case, flops: float, moved: float, received: float) -> dict[str, float]:
    """Seconds that each part of a chip takes at its published speed.

    Args:
        flops: Operations of one chip.
        moved: Bytes to and from its memory.
        received: Bytes over its links to other chips.
    """
    chip = case.topology.chip
    return {
        "arithmetic": flops / chip.peak_flops,
        "memory": moved / chip.memory_bandwidth,
        "links": received / chip.link_bandwidth,
    }


def estimated_pairs_per_second(case: Case) -> float:
    """The rate at best by formula: all columns of the rows computed, state and gradients read and written once."""
    flops, least = needed_flops(case), least_memory(case)
    computed = (flops.needed + flops.recomputed) * max(case.columns / max(case.lengths.tokens, 1), 1)
    moved, received = 2 * least.weights + 6 * least.gradients, sum(least_traffic(case).values())
    return case.pairs / max(seconds_of(case, computed / case.topology.chips, moved, received).values())
