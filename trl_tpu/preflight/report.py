"""What a user reads before renting a TPU, as numbers: does it fit, what limits it, how long it takes at best."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from .case import Case
from .compile import CompiledProgram
from .needs import Flops, Memory, kernel_flops, least_memory, least_traffic, needed_flops

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
    def available(self) -> int:
        return self.case.topology.chip.memory

    @property
    def fits(self) -> bool:
        return self.program.peak <= self.available

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

    @cached_property
    def flops_compiled(self) -> float:
        """Operations of a pass over all chips: as the compiler counts them, and of attention kernels at least."""
        return self.program.flops * self.case.topology.chips + kernel_flops(self.case)

    @cached_property
    def traffic(self) -> dict[str, dict[str, float]]:
        """Bytes that a chip receives in a pass, by mesh axes: compiled, and needed."""
        least, received = least_traffic(self.case), self.program.received
        return {
            axes: {"compiled": sum(received.get(axes, {}).values()), "needed": least.get(axes, 0)}
            for axes in dict.fromkeys([*least, *received])
        }

    # ---- time: the roofline model, https://doi.org/10.1145/1498765.1498785

    @cached_property
    def seconds(self) -> dict[str, float]:
        """What a pass takes each part of a chip at its published speed."""
        sizes = self.flops_compiled / self.case.topology.chips, self.program.bytes_moved
        return seconds_of(self.case, *sizes, sum(each["compiled"] for each in self.traffic.values()))

    @property
    def at_best(self) -> float:
        """Seconds of a pass if all parts work at the same time."""
        return max(self.seconds.values())

    @property
    def in_turns(self) -> float:
        """Seconds of a pass if they take turns. It is no upper limit: nothing works at its published speed."""
        return sum(self.seconds.values())

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    @property
    def pairs_per_second(self) -> float:
        """At best."""
        return self.case.pairs / self.at_best

    @property
    def mfu(self) -> float:
        """The ceiling on model FLOPs utilization."""
        return self.flops.needed / self.case.topology.chips / self.case.topology.chip.peak_flops / self.at_best

    @property
    def hours(self) -> tuple[float, float] | None:
        """Hours of the training: if a chip's parts work at once, and in turns."""
        if self.pairs_to_train is None:
            return None
        passes = self.pairs_to_train / self.case.pairs
        return passes * self.at_best / 3600, passes * self.in_turns / 3600

    @property
    def chip_hours(self) -> tuple[float, ...]:
        return tuple(each * self.case.topology.chips for each in self.hours or ())

    @property
    def cost(self) -> tuple[float, ...]:
        return tuple(each * self.price_per_chip_hour for each in self.chip_hours if self.price_per_chip_hour)

    def as_json(self) -> dict[str, Any]:
        """Everything the text says, in bytes, operations and seconds."""
        model = self.case.job.model
        return self.case.as_json() | {
            "chips": self.case.topology.chips,
            "parameters": model.parameters,
            "trained_parameters": model.trained_parameters,
            "unique_tokens": self.case.lengths.tokens,
            "fits": self.fits,
            "memory_available": self.available,
            "memory_peak": self.program.peak,
            "memory_bound": self.least.bound,
            "memory_by_kind": self.memory_by_kind,
            "flops_needed": self.flops.needed,
            "flops_with_remat": self.flops.needed + self.flops.recomputed,
            "flops_compiled": self.flops_compiled,
            "traffic": self.traffic,
            "seconds": self.seconds,
            "seconds_step_at_best": self.at_best,
            "seconds_step_in_turns": self.in_turns,
            "limit": self.limit,
            "mfu_ceiling": self.mfu,
            "pairs_per_second_at_best": self.pairs_per_second,
            "hours": self.hours,
            "chip_hours": self.chip_hours or None,
            "cost": self.cost or None,
            "program": asdict(self.program),
            "notes": [*self.case.job.notes, UNSEEN],
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
    """The rate at best by formula: all columns of the rows computed, what memory holds read and written once."""
    flops = needed_flops(case)
    computed = (flops.needed + flops.recomputed) * max(case.columns / max(case.lengths.tokens, 1), 1)
    moved, received = 2 * least_memory(case).bound, sum(least_traffic(case).values())
    return case.pairs / max(seconds_of(case, computed / case.topology.chips, moved, received).values())
