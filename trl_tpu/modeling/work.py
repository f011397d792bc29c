"""The operations that training needs of a model, by formula: what a compiler or a kernel does beyond is no work."""

from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import nn

from ..data.measure import measure
from ..packing.lengths import PairLengths
from .model_shape import ModelShape, read_model


@dataclass(frozen=True)
class Work:
    """Operations on some pairs: matrix products, two for each multiply-add.

    Args:
        needed: Forward and backward, which model FLOPs utilization counts.
        layers: The forward of decoder layers, without attention.
        attention: Queries with keys and what they weigh with values, forward.
    """

    needed: float
    layers: float
    attention: float


def work_of(model: ModelShape, pairs: PairLengths) -> Work:
    """Return the operations that ``pairs`` need: each unique token is computed once, padding never.

    Counted as in the literature on model FLOPs utilization (https://arxiv.org/abs/2204.02311, appendix B): 2 N a token
    in the forward of N weights, twice that in the backward; attention by the tokens that it really sees. Looking up
    embeddings, norms and activations are not counted. Frozen weights need no gradient, but pass the one of their input
    on; so is counted what lies below the first trained weight, too.
    """
    products = [weight for weight in model.weights if weight.kind in ("matrix", "experts")]
    forward = {weight: 2.0 * weight.numel * weight.used * pairs.tokens for weight in products}
    trained = sum(forward[weight] for weight in products if weight.trained)
    layers = sum(forward[weight] for weight in products if weight.in_layer)
    seen = {window: pairs.attended(window) for window in set(model.windows)}
    attention = sum(2.0 * model.heads * sum(model.head_dims) * seen[window] for window in model.windows)
    return Work(2 * sum(forward.values()) + trained + 3 * attention, layers, attention)


def work_of_a_pair(model: nn.Module, dataset: Any) -> float | None:
    """Return the operations that an average pair of ``dataset`` needs, forward and backward.

    None where that is not known: of a stream, of a model that is no causal decoder of transformers, or is quantized.
    """
    if not isinstance(dataset, Dataset) or getattr(model, "is_quantized", False):
        return None
    try:
        shape = read_model(model)
        if not _attends_in_every_layer(model):
            return None
        pairs = measure(dataset).lengths
    except (AttributeError, TypeError, ValueError):  # of the user's own: no such config, or no such columns
        return None
    return work_of(shape, pairs).needed / len(pairs) if len(pairs) else None


def _attends_in_every_layer(model: Any) -> bool:
    """Tell whether each layer has attention to what came before, of a whole text or in a window."""
    config = model.config.get_text_config()
    causal = [module for module in model.modules() if getattr(module, "is_causal", False)]
    kinds = set(getattr(config, "layer_types", None) or ())
    both_ways = getattr(config, "use_bidirectional_attention", False)
    return (
        len(causal) == config.num_hidden_layers and kinds <= {"full_attention", "sliding_attention"} and not both_ways
    )
