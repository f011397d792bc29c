"""What a training step needs of a chip's memory at least: state by the sharding plan, and what the backward waits for.

A compiler needs room to work on top; how much, only compiling says.
"""

from dataclasses import dataclass
from math import prod

from ..parallel.mesh import names_of
from .analytic import ModelShape, Weight
from .case import Case

# Copies of each trained weight that an optimizer keeps, by the beginning of its name in transformers.
_OPTIMIZER_COPIES = {"adamw": 2, "adam": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1, "lion": 1}


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip.

    Args:
        weights: As the trainer keeps them.
        optimizer: Adam's two moments, or what another optimizer keeps.
        gradients: Of the trained weights, all at once.
        activations: What the remat policy keeps from the forward for the backward.
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
    """The memory of ``case``, by formula."""
    trained = sum(_held(case, weight) for weight in case.model.weights if weight.trained)
    return Memory(
        weights=sum(_held(case, weight) for weight in case.model.weights),
        optimizer=optimizer_copies(case.optim) * trained,
        gradients=trained,
        activations=_activations(case),
    )


def optimizer_copies(optim: str) -> int:
    """How many numbers the optimizer keeps of each trained weight; 2, as Adam, of those not known here."""
    if optim.startswith(("adafactor", "apollo", "galore")):  # which keep less than a copy
        return 0
    name = next((each for each in _OPTIMIZER_COPIES if optim.startswith(each)), "adamw")
    return _OPTIMIZER_COPIES[name]


def _held(case: Case, weight: Weight) -> int:
    return weight.bytes // case.placements[weight.name].parts(case.mesh)


def _activations(case: Case) -> int:
    """Kept of all layers: the input, in the weights' type; of products what they give ("dots") and take ("none").

    The trainer's weights are float32, and so is what layers add up; products give the compute type.
    """
    columns, model = case.columns_per_part, case.model
    kept = residual_bytes(model) * model.hidden * model.layers * columns
    if case.remat == "full":
        return kept
    features = _outputs(case) + (_inputs(case) if case.remat == "none" else 0)
    kept += int(features * columns * case.compute_bytes)
    if case.remat == "none":
        kept += residual_bytes(model) * model.hidden * model.layers * columns  # between attention and the rest
    if case.masks:
        heads = model.heads // case.mesh.tensor
        kept += heads * case.length * columns * case.compute_bytes * model.layers
    return kept


def residual_bytes(model: ModelShape) -> int:
    """Of a number that goes from layer to layer: it has the type of the embeddings."""
    return next((weight.itemsize for weight in model.weights if weight.kind == "embedding"), 4)


def _outputs(case: Case) -> float:
    """Features of a token that all products with weights of layers give, on one chip."""
    return sum(
        prod(weight.shape[:-1]) * weight.used / _parts(case, weight, -2)
        for weight in case.model.weights
        if weight.layer and weight.kind in ("matrix", "experts")
    )


def _inputs(case: Case) -> float:
    """Features of a token that these products take: what several weights of a block share counts once."""
    features = 0.0
    seen: set[tuple[str, int]] = set()
    for weight in case.model.weights:
        if not weight.layer or weight.kind not in ("matrix", "experts"):
            continue
        last = gives_hidden(weight, case.model)
        shared = (weight.block, weight.shape[-1])
        if last or shared not in seen:
            copies = weight.shape[0] * weight.used if weight.kind == "experts" and last else 1
            features += weight.shape[-1] * copies / _parts(case, weight, -1)
        if not last:
            seen.add(shared)
    return features


def gives_hidden(weight: Weight, model: ModelShape) -> bool:
    """Whether a weight is the last of its block: what it gives is added to what goes from layer to layer."""
    names = ("o_proj", "down_proj", "out_proj", "dense", "c_proj", "fc2", "wo", "w2", "dense_4h_to_h")
    if weight.kind not in ("matrix", "experts") or not weight.layer or ".lora_" in weight.name:
        return False
    leaf = weight.name.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2]
    return weight.shape[-2] == model.hidden and leaf in names


def _parts(case: Case, weight: Weight, dim: int) -> int:
    """In how many parts `tensor` cuts the features of dimension ``dim``; experts are cut whole."""
    axes = case.placements[weight.name].axes
    cut = "tensor" in names_of(axes[dim]) or (weight.kind == "experts" and "tensor" in names_of(axes[0]))
    return case.mesh.tensor if cut else 1


__all__ = ["Memory", "least_memory"]
