"""What chips send each other in a step, by mesh axis: what the compiler made, and what the mesh needs at least.

Bytes are those that a chip receives over its links at least: what it has itself it need not be sent, and adding up
sends everything twice, once to where it is added and once back. https://doi.org/10.1016/j.jpdc.2008.09.002
"""

from collections.abc import Iterable
from math import prod

from ..parallel.mesh import AXES, MeshShape
from .analytic import Weight
from .case import Case
from .memory import gives_hidden, residual_bytes
from .program import Collective

#: Bytes by the mesh axes that they go over: "fsdp", "data+fsdp", ...
ByAxis = dict[str, int]


def axes_of(groups: tuple[tuple[int, ...], ...], mesh: MeshShape) -> str:
    """The mesh axes that ``groups`` of devices go over, joined by "+"; no groups are all devices in one.

    Devices are numbered as the mesh is laid out: the last of `AXES` fastest.
    """
    if not groups:
        return "+".join(axis for axis in AXES if mesh.sizes[axis] > 1)
    sizes = [mesh.sizes[axis] for axis in AXES]
    steps = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    differ = [
        any(len({device // step % size for device in group}) > 1 for group in groups)
        for size, step in zip(sizes, steps, strict=True)
    ]
    return "+".join(axis for axis, is_crossed in zip(AXES, differ, strict=True) if is_crossed)


def group_size(collective: Collective, mesh: MeshShape) -> int:
    """How many chips take part together."""
    return len(collective.groups[0]) if collective.groups else mesh.devices


def compiled_traffic(collectives: Iterable[Collective], mesh: MeshShape) -> ByAxis:
    """Bytes of a step by axis, as the compiler made them. What stays on a chip is left out."""
    found: dict[str, float] = {}
    for each in collectives:
        if axes := axes_of(each.groups, mesh):
            found[axes] = found.get(axes, 0) + received(each, mesh)
    return {axes: round(size) for axes, size in sorted(found.items())}


def received(collective: Collective, mesh: MeshShape) -> float:
    """Bytes that a chip receives over its links at least, in all executions of a step."""
    size = group_size(collective, mesh)
    share = 1.0 if collective.kind == "collective-permute" else (size - 1) / size
    return collective.bytes * collective.count * share * (2 if collective.kind == "all-reduce" else 1)


def least_traffic(case: Case) -> ByAxis:
    """Bytes of a pass by axis that the mesh needs, by formula, in the type of matrix products.

    Over `fsdp` each split weight is gathered for the forward and again for the backward, and gradients are added up
    and scattered once (ZeRO-3, https://arxiv.org/abs/1910.02054). Over `data`, gradients are added up. Over `tensor`,
    what each block of a layer gives is added up in the forward, and what it passes back in the backward (Megatron,
    https://arxiv.org/abs/1909.08053). Embeddings' features are exchanged instead of their tables.
    """
    found = {axis: 0 for axis in AXES if case.mesh.sizes[axis] > 1}
    for weight in case.model.weights:
        for axis, size in _of_weight(case, weight).items():
            found[axis] += size
    if "tensor" in found:
        found["tensor"] += _of_blocks(case)
    return {axis: round(size * (1 - 1 / case.mesh.sizes[axis])) for axis, size in found.items()}


def _of_weight(case: Case, weight: Weight) -> ByAxis:
    """With what a chip has itself."""
    placement = case.placements[weight.name]
    itemsize = min(weight.itemsize, case.compute_bytes) if weight.kind in ("matrix", "experts") else weight.itemsize
    over_tensor = case.mesh.tensor if "tensor" in placement.names else 1
    found = {axis: 0 for axis in AXES if case.mesh.sizes[axis] > 1}
    looked_up = weight.kind == "embedding" and placement.axes[0] is None and placement.is_sharded
    if looked_up:
        features = case.columns_per_part * case.model.hidden * residual_bytes(case.model)
        if "fsdp" in placement.names:  # to where their rows are, and gradients back
            found["fsdp"] += features // over_tensor * (2 if weight.trained else 1)
        if "tensor" in placement.names:
            found["tensor"] += features
    whole = weight.numel * itemsize // over_tensor
    if "fsdp" in found and not looked_up:
        if "fsdp" in placement.names:
            found["fsdp"] += whole * ((2 if weight.used else 0) + (1 if weight.trained else 0))
        elif weight.trained:
            found["fsdp"] += 2 * whole
    if "data" in found and weight.trained:
        found["data"] += 2 * (weight.numel * itemsize // placement.parts(case.mesh))
    return found


def _of_blocks(case: Case) -> int:
    """What layers' blocks send to add up over `tensor`; full remat adds up again all but the last of each layer."""
    split = [
        weight
        for weight in case.model.weights
        if gives_hidden(weight, case.model) and "tensor" in case.placements[weight.name].names
    ]
    again = len(split) - len({weight.layer for weight in split}) if case.remat == "full" else 0
    one = case.columns_per_part * case.model.hidden * case.compute_bytes
    return 2 * one * (2 * len(split) + again)


__all__ = ["ByAxis", "axes_of", "compiled_traffic", "least_traffic", "received"]
