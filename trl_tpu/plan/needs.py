"""What a training step needs at least, by formula: operations, a chip's memory, and bytes between chips.

A compiler needs more of each; how much more, only compiling says.
"""

from dataclasses import dataclass

from ..modeling.model_shape import Weight
from ..modeling.work import work_of
from ..parallel.mesh import AXES, names_of
from ..parallel.sharding_plan import bare_name
from ..runtime import Remat
from ..runtime.kernels.blocks import padded
from .case import Case

# Copies of each trained weight that an optimizer keeps, by the beginning of its name in transformers.
_OPTIMIZER_COPIES = {"adam": 2, "adagrad": 1, "rmsprop": 1, "lion": 1, "sgd": 0} | dict.fromkeys(
    ("adafactor", "apollo", "galore"),
    0,  # less than a copy
)


@dataclass(frozen=True)
class Flops:
    """Operations of one pass, over all chips: matrix products, two for each multiply-add.

    Args:
        needed: Forward and backward, which model FLOPs utilization counts.
        recomputed: What remat computes again at most.
        kernels: What attention kernels do at least, which a compiler does not count; 0 where masks are used instead.
            The forward is two products. The backward is two kernels, for queries and for keys, which both begin with
            scores and their gradients: seven products.
        kernel_units: What arithmetic units could do meanwhile: they are as wide as vectors, which small heads do not
            fill.
    """

    needed: float
    recomputed: float
    kernels: float
    kernel_units: float


def needed_flops(case: Case) -> Flops:
    """The operations that the pairs of ``case`` need, see `work_of`."""
    work, head_dims, again = work_of(case.job.model, case.lengths), case.job.model.head_dims, case.remat == Remat.FULL
    kernels = 0.0 if case.masks else work.attention * (1 + again + 7 / 2)
    units = kernels * sum(map(padded, head_dims)) / sum(head_dims)
    return Flops(work.needed, again * (work.layers + work.attention), kernels, units)


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


def least_memory(case: Case) -> Memory:
    """The memory of ``case``: state by the sharding plan, and activations."""
    held = {weight: weight.bytes // case.placements[weight.name].parts(case.mesh) for weight in case.job.model.weights}
    trained = sum(size for weight, size in held.items() if weight.trained)
    return Memory(sum(held.values()), optimizer_copies(case.job.optim) * trained, trained, _activations(case))


def optimizer_copies(optim: str) -> int:
    """How many numbers the optimizer keeps of each trained weight; 2, as Adam, where it is not known here."""
    return next((copies for name, copies in _OPTIMIZER_COPIES.items() if optim.startswith(name)), 2)


def _activations(case: Case) -> int:
    """Kept of all layers: the input; unless remat is full what products give, and with none also what they take."""
    model, columns = case.job.model, case.columns_per_part
    inputs = model.residual_bytes * model.hidden * model.layers * columns
    if case.remat == Remat.FULL:
        return inputs
    products = [weight for weight in model.weights if weight.in_layer and weight.kind in ("matrix", "experts")]
    features = sum(_copies(weight) * _features(case, weight, -2) for weight in products)
    if case.remat == Remat.NONE:
        features += _features_taken(case, products)
    scores = case.shape[1] * model.heads // case.mesh.tensor * model.layers if case.masks else 0
    between_blocks = inputs if case.remat == Remat.NONE else 0
    return inputs + between_blocks + int((features + scores) * columns * case.job.compute_bytes)


def _features_taken(case: Case, products: list[Weight]) -> float:
    """Features of a token that products take, on one chip: all of a block share their input, but for its last one."""
    blocks: dict[str, list[Weight]] = {}
    for weight in products:
        if ".lora_" not in weight.name:
            block = bare_name(weight.name).removesuffix(".weight").rpartition(".")[0]
            blocks.setdefault(block, []).append(weight)
    taken = 0.0
    for *first, last in blocks.values():
        taken += sum({weight.shape[-1]: _features(case, weight, -1) for weight in first}.values())
        taken += _copies(last) * _features(case, last, -1)
    return taken


def _copies(weight: Weight) -> float:
    """How many of a stack of experts a token is multiplied with; 1 of other weights."""
    return weight.used * (weight.shape[0] if len(weight.shape) == 3 else 1)


def _features(case: Case, weight: Weight, dim: int) -> float:
    """Features of dimension ``dim`` on one chip."""
    axes = case.placements[weight.name].axes
    is_cut = "tensor" in names_of(axes[dim]) or (weight.kind == "experts" and "tensor" in names_of(axes[0]))
    return weight.shape[dim] / (case.mesh.tensor if is_cut else 1)


def least_traffic(case: Case) -> dict[str, int]:
    """Bytes that a chip receives in a pass, by mesh axis, in the type of matrix products.

    Over `fsdp` each split weight is gathered for the forward and again for the backward, and gradients are added up
    and scattered once (ZeRO-3, https://arxiv.org/abs/1910.02054). Over `data`, gradients are added up. Over `tensor`,
    what the two blocks of a layer give is added up in the forward, and what they pass back in the backward (Megatron,
    https://arxiv.org/abs/1909.08053); full remat adds up one of them again. Embeddings' features are exchanged instead
    of their tables. What a chip has itself it need not receive, and what is added up everywhere comes twice.
    """
    axes = [axis for axis in AXES if case.mesh.sizes[axis] > 1]
    found = dict.fromkeys(axes, 0.0)
    for weight in case.job.model.weights:
        for axis in axes:
            found[axis] += _moved(case, weight, axis)
    if "tensor" in found:
        block = case.columns_per_part * case.job.model.hidden * case.job.compute_bytes
        found["tensor"] += 2 * block * case.job.model.layers * (5 if case.remat == Remat.FULL else 4)
    return {axis: round(size * (1 - 1 / case.mesh.sizes[axis])) for axis, size in found.items()}


def _moved(case: Case, weight: Weight, axis: str) -> float:
    """Bytes of ``weight`` and its gradient that go over ``axis``, with what a chip has itself."""
    placement = case.placements[weight.name]
    itemsize = (
        min(weight.itemsize, case.job.compute_bytes) if weight.kind in ("matrix", "experts") else weight.itemsize
    )
    over_tensor = case.mesh.tensor if "tensor" in placement.names else 1
    if axis == "data":
        return 2 * weight.trained * weight.numel * itemsize // placement.parts(case.mesh)
    if weight.kind == "embedding" and placement.is_sharded and placement.axes[0] is None:
        features = case.columns_per_part * case.job.model.hidden * case.job.model.residual_bytes
        if axis not in placement.names:
            return 0
        return features if axis == "tensor" else features / over_tensor * (1 + weight.trained)
    if axis == "tensor":
        return 0
    whole = weight.numel * itemsize / over_tensor
    if axis in placement.names:
        return whole * (2 * (weight.used > 0) + weight.trained)
    return 2 * whole * weight.trained
