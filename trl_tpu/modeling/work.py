"""Operations that training needs, by formula. What a compiler or a kernel computes beyond them does not count."""

from typing import Any

from datasets import Dataset
from torch import nn

from ..data.measure import measure
from ..packing.lengths import PairLengths
from .model_shape import ModelShape, read_model


def needed_flops(model: ModelShape, pairs: PairLengths) -> float:
    """Return the operations that ``pairs`` need, forward and backward: each unique token once, without padding.

    Counted as for model FLOPs utilization (https://arxiv.org/abs/2204.02311, appendix B): 2 N per token in the
    forward of N weights, twice that in the backward; attention by the tokens that are attended to. Embedding lookups,
    norms and activations are not counted. No weight gradient is counted for frozen weights. Input gradients are
    counted for every layer, an overestimate below the first trainable weight.
    """
    products = [weight for weight in model.weights if weight.kind in ("matrix", "experts")]
    forward = {weight: 2.0 * weight.numel * weight.used * pairs.tokens for weight in products}
    trained = sum(forward[weight] for weight in products if weight.trained)
    attended = {window: pairs.attended(window) for window in set(model.windows)}
    attention = sum(2.0 * model.heads * sum(model.head_dims) * attended[window] for window in model.windows)
    return 2 * sum(forward.values()) + trained + 3 * attention


def work_of_a_pair(model: nn.Module, dataset: Any) -> float | None:
    """Return the operations that an average pair of ``dataset`` needs, forward and backward.

    None if unknown: for a stream, a quantized model, or a model that is no causal decoder of transformers.
    """
    if not isinstance(dataset, Dataset) or getattr(model, "is_quantized", False):
        return None
    try:
        shape = read_model(model)
        if not _attends_in_every_layer(model):
            return None
        pairs = measure(dataset).lengths
    except (AttributeError, TypeError, ValueError):  # a user's own config or columns
        return None
    return needed_flops(shape, pairs) / len(pairs) if len(pairs) else None


def _attends_in_every_layer(model: Any) -> bool:
    """Tell whether each layer has attention to what came before, of a whole text or in a window."""
    config = model.config.get_text_config()
    causal = [module for module in model.modules() if getattr(module, "is_causal", False)]
    kinds = set(getattr(config, "layer_types", None) or ())
    both_ways = getattr(config, "use_bidirectional_attention", False)
    return (
        len(causal) == config.num_hidden_layers and kinds <= {"full_attention", "sliding_attention"} and not both_ways
    )
