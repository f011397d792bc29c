"""What a training step needs at least, by formula: operations, a chip's memory, bytes between chips, and time.

A compiler needs more of each; how much more memory, compiling says.
"""

from dataclasses import dataclass
from math import prod

from ..modeling.model_shape import Weight
from ..modeling.work import work_of
from ..parallel.mesh import AXES, names_of
from ..parallel.sharding_plan import bare_name
from ..runtime import Remat
from .workload import Layout

# Copies of each trained weight that an optimizer keeps, by the beginning of its name in transformers.
_OPTIMIZER_COPIES = {"adafactor": 0, "adagrad": 1, "adam": 2, "lion": 1, "rmsprop": 1, "sgd": 0}


def needed_flops(layout: Layout) -> float:
    """Return the operations that the pairs of a micro-batch need, forward and backward, over all chips.

    Matrix products, two for each multiply-add, as model FLOPs utilization counts them: see `work_of`.
    """
    return work_of(layout.workload.model, layout.lengths).needed


def computed_flops(layout: Layout) -> float:
    """Return the same with what full remat computes again, and for padding too, as if it were real tokens."""
    work = work_of(layout.workload.model, layout.lengths)
    again = work.layers + work.attention if layout.remat == Remat.FULL else 0.0
    return (work.needed + again) * max(layout.tokens / max(layout.lengths.tokens, 1), 1)


# ---- memory


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip.

    Args:
        weights: As the trainer keeps them.
        optimizer: Adam's two moments, or what another optimizer keeps.
        gradients: Of the trained weights, all at once.
        activations: What the backward waits for of each layer, see `Remat`.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int

    @property
    def bound(self) -> int:
        """All of it: what no compiler can do without, unless it updates weights before the backward has ended."""
        return self.weights + self.optimizer + self.gradients + self.activations


def least_memory(layout: Layout) -> Memory:
    """Return the memory of ``layout``: state by the sharding plan, and activations."""
    weights, placements = layout.workload.model.weights, layout.placements
    held = {weight: weight.bytes // placements[weight.name].parts(layout.mesh) for weight in weights}
    trained = sum(size for weight, size in held.items() if weight.trained)
    return Memory(sum(held.values()), optimizer_copies(layout.workload.args.optim) * trained, trained, _kept(layout))


def optimizer_copies(optim: str) -> int:
    """Return how many numbers an optimizer keeps of each trained weight; 2, as Adam, where it is not known here."""
    return next((copies for begin, copies in _OPTIMIZER_COPIES.items() if optim.startswith(begin)), 2)


def _kept(layout: Layout) -> int:
    """Return the activations that are kept of all layers.

    Those are inputs; unless remat is full what products give, and with none also what they take.
    """
    model, tokens = layout.workload.model, layout.tokens_per_shard
    in_memory = not layout.workload.args.activation_offloading  # else with the host
    inputs = model.residual_bytes * model.hidden * model.layers * tokens * in_memory
    if layout.remat == Remat.FULL:
        return inputs
    products = [weight for weight in model.weights if weight.in_layer and weight.kind in ("matrix", "experts")]
    features = sum(_copies(weight) * _features(layout, weight, -2) for weight in products)
    if layout.remat == Remat.NONE:
        features += _features_taken(layout, products)
    masks = layout.workload.attends_with_masks(layout.shape[1])
    scores = layout.shape[1] * model.heads // layout.mesh.tensor * model.layers if masks else 0
    between_blocks = inputs if layout.remat == Remat.NONE else 0
    return inputs + between_blocks + int((features + scores) * tokens * layout.workload.compute_bytes)


def _features_taken(layout: Layout, products: list[Weight]) -> float:
    """Return how many features of a token products take on one chip: all of a block share their input but the last."""
    blocks: dict[str, list[Weight]] = {}
    for weight in products:
        if ".lora_" not in weight.name:
            block = bare_name(weight.name).removesuffix(".weight").rpartition(".")[0]
            blocks.setdefault(block, []).append(weight)
    taken = 0.0
    for *first, last in blocks.values():
        taken += sum({weight.shape[-1]: _features(layout, weight, -1) for weight in first}.values())
        taken += _copies(last) * _features(layout, last, -1)
    return taken


def _copies(weight: Weight) -> float:
    """Return with how many of a stack of experts a token is multiplied; 1 for other weights."""
    return weight.used * (weight.shape[0] if len(weight.shape) == 3 else 1)


def _features(layout: Layout, weight: Weight, dim: int) -> float:
    """Return the features of dimension ``dim`` on one chip."""
    axes = layout.placements[weight.name].axes
    is_cut = "tensor" in names_of(axes[dim]) or (weight.kind == "experts" and "tensor" in names_of(axes[0]))
    return weight.shape[dim] / (layout.mesh.tensor if is_cut else 1)


# ---- between chips


def least_traffic(layout: Layout) -> dict[str, int]:
    """Return the bytes that a chip receives in a micro-batch, by mesh axis, in the type of matrix products.

    Over `fsdp` each split weight is gathered for the forward and again for the backward, and gradients are added up
    and scattered once (ZeRO-3, https://arxiv.org/abs/1910.02054). Over `data`, gradients are added up. Over `tensor`,
    what the two blocks of a layer give is added up in the forward, and what they pass back in the backward (Megatron,
    https://arxiv.org/abs/1909.08053); full remat adds up one of them again. Embeddings' features are exchanged instead
    of their tables. What a chip has itself it need not receive, and what is added up everywhere comes twice.
    """
    workload, mesh = layout.workload, layout.mesh
    found = {axis: 0.0 for axis in AXES if mesh.sizes[axis] > 1}
    for weight in workload.model.weights:
        for axis in found:
            found[axis] += _moved(layout, weight, axis)
    if "tensor" in found:
        block = layout.tokens_per_shard * workload.model.hidden * workload.compute_bytes
        found["tensor"] += 2 * block * workload.model.layers * (5 if layout.remat == Remat.FULL else 4)
    return {axis: round(size * (1 - 1 / mesh.sizes[axis])) for axis, size in found.items()}


def _moved(layout: Layout, weight: Weight, axis: str) -> float:
    """Return the bytes of ``weight`` and its gradient that go over ``axis``, with what a chip has itself."""
    workload, names = layout.workload, layout.placements[weight.name].names
    others = prod(layout.mesh.sizes[name] for name in names if name != axis)
    if weight.kind == "embedding" and axis in names:
        features = layout.tokens_per_shard * workload.model.hidden * workload.model.residual_bytes
        return features if axis == "tensor" else features / others * (1 + weight.trained)
    if axis == "tensor":
        return 0
    in_products = weight.kind in ("matrix", "experts")
    itemsize = min(weight.itemsize, workload.compute_bytes) if in_products else weight.itemsize
    times = 2 * (weight.used > 0) + weight.trained if axis in names else 2 * weight.trained
    return times * weight.numel * itemsize / others


# ---- time: the roofline model, https://doi.org/10.1145/1498765.1498785


def least_seconds(layout: Layout) -> dict[str, float]:
    """Return how long a micro-batch takes each part of a chip at its published speed.

    What is kept on a chip, and what it receives, is written to its memory and read once.
    """
    chip, received = layout.topology.chip, sum(least_traffic(layout).values())
    return {
        "arithmetic": computed_flops(layout) / layout.topology.chips / chip.peak_flops,
        "memory": 2 * (least_memory(layout).bound + received) / chip.memory_bandwidth,
        "links": received / chip.link_bandwidth,
    }


def most_pairs_per_second(layout: Layout) -> float:
    """Return the rate if all parts of a chip work at the same time."""
    return layout.pairs / max(least_seconds(layout).values())
