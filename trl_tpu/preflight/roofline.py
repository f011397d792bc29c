"""How fast a step can be at best: by arithmetic, by memory and by links, each at its published speed.

https://doi.org/10.1145/1498765.1498785 (the roofline model)
"""

from dataclasses import dataclass

from .analytic import count_flops
from .attention_blocks import kernel_unit_flops
from .case import Case
from .program import CompiledProgram
from .traffic import least_traffic, received


@dataclass(frozen=True)
class Roofline:
    """Seconds that one pass takes each part of a chip at its published speed, and what follows.

    Args:
        compute: Matrix products.
        memory: Reading and writing the chip's memory.
        links: Receiving from other chips, over all links at once.
        useful: Seconds of products that the pairs need, each unique token once and nothing again.
        pairs: In a pass.
    """

    compute: float
    memory: float
    links: float
    useful: float
    pairs: int

    @property
    def fastest(self) -> float:
        """Seconds of a pass if all parts work at the same time."""
        return max(self.compute, self.memory, self.links)

    @property
    def slowest(self) -> float:
        """Seconds of a pass if they take turns. It is no upper limit: nothing works at its published speed."""
        return self.compute + self.memory + self.links

    @property
    def limit(self) -> str:
        """What takes longest."""
        times = {"arithmetic": self.compute, "memory": self.memory, "links": self.links}
        return max(times, key=lambda name: times[name])

    @property
    def most_mfu(self) -> float:
        """The ceiling on model FLOPs utilisation."""
        return self.useful / self.fastest

    @property
    def most_pairs_per_second(self) -> float:
        return self.pairs / self.fastest

    @property
    def pairs_per_second_in_turns(self) -> float:
        return self.pairs / self.slowest


def compiled_roofline(case: Case, program: CompiledProgram) -> Roofline:
    """Of a compiled pass."""
    chip, chips = case.topology.chip, case.topology.chips
    useful = count_flops(case.model, case.lengths).useful / chips
    return Roofline(
        compute=(program.flops + kernel_unit_flops(case) / chips) / chip.peak_flops,
        memory=program.bytes_accessed / chip.memory_bandwidth,
        links=sum(received(each, case.mesh) for each in program.collectives) / chip.link_bandwidth,
        useful=useful / chip.peak_flops,
        pairs=case.pairs,
    )


def estimated_roofline(case: Case) -> Roofline:
    """Before compiling, by formula: all columns of the rows computed, state read and written once."""
    chip, chips = case.topology.chip, case.topology.chips
    flops = count_flops(case.model, case.lengths, case.remat)
    padded = case.rows * case.length / max(case.lengths.tokens, 1)
    state = sum(
        weight.bytes / case.placements[weight.name].parts(case.mesh) * (8 if weight.trained else 2)
        for weight in case.model.weights
    )
    return Roofline(
        compute=flops.with_remat * max(padded, 1.0) / chips / chip.peak_flops,
        memory=state / chip.memory_bandwidth,
        links=sum(least_traffic(case).values()) / chip.link_bandwidth,
        useful=flops.useful / chips / chip.peak_flops,
        pairs=case.pairs,
    )


__all__ = ["Roofline", "compiled_roofline", "estimated_roofline"]
