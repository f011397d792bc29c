"""The sizes of a model: the positions it can read, its weights, and the operations of its forward and backward."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from ..data.length_stats import length_stats
from ..packing.shapes import RowLengths


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of usable rows in a model's table of learned positions; None if the model has no such table.

    For positions beyond the table, the CPU and CUDA raise an error, and XLA silently reads the last row.
    A table with a padding row, such as RoBERTa's, is used from the row after the padding row on.
    """
    config: Any = model.config.get_text_config()
    if any(getattr(config, way, None) for way in ("rope_parameters", "relative_attention", "alibi")):
        return None
    count = getattr(config, "max_position_embeddings", None)
    tables: Any = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    rows = [table for table in tables if getattr(table, "num_embeddings", None) == count]
    unused = max((table.padding_idx + 1 for table in rows if table.padding_idx is not None), default=0)
    # XLNet has -1: it computes positions
    return count - unused if count and count > 0 else None


def position_groups(model: PreTrainedModel) -> Callable[[float], float]:
    """Return a function that maps a length to a group: lengths of one group have the same rotary frequencies.

    Group 0 has the usual frequencies. For ``longrope`` and ``dynamic``, transformers chooses the frequencies of a
    whole forward by its longest sequence. Beyond a limit, ``longrope`` has one other set of frequencies, and
    ``dynamic`` has one set per length. Later forwards keep that set until one is below the limit.
    """
    config: Any = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # settings of all layers, or of each kind of layers
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            limit = rope["original_max_position_embeddings"]
            return lambda length: int(length > limit)
        if kind == "dynamic":
            return lambda length: length if length > config.max_position_embeddings else 0
    return lambda length: 0


def outgrows_positions(model: PreTrainedModel, max_length: int | None) -> bool:
    """Return whether a sequence may be long enough to change the positions of shorter sequences in its batch."""
    return position_groups(model)(max_length or math.inf) > 0


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its memory and operations.

    Args:
        parameters: Number of parameters; tied parameters count once.
        trained_parameters: Number of parameters with a gradient.
        hidden: Hidden size.
        products: Number of weights that multiply a token. Of experts, only the routed ones count.
        trained_products: Number of such weights with a gradient.
        attention: Multiplications per pair of query and key in one layer: query with key, and weight with value.
        windows: Number of tokens that a token sees in each layer; None for all earlier tokens.
    """

    parameters: int
    trained_parameters: int
    hidden: int
    products: float
    trained_products: float
    attention: int
    windows: tuple[int | None, ...]


def model_shape_of(model: Any) -> ModelShape:
    """Return the sizes of a reward model. It may be on torch's meta device, and may have adapters."""
    config = model.config.get_text_config()
    routed = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    share = routed / next((count for name in names if (count := getattr(config, name, None))), routed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes, products = Counter[bool](), {True: 0.0, False: 0.0}
    for name, parameter in model.named_parameters():
        sizes[parameter.requires_grad] += parameter.numel()
        # Vectors and embedding tables multiply no token, nor does an original module that PEFT trains a copy of.
        if parameter.dim() > 1 and id(parameter) not in tables and ".original_module." not in name:
            is_routed = "experts" in name.split(".")
            products[parameter.requires_grad] += parameter.numel() * (share if is_routed else 1.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dims = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    attention = config.num_attention_heads * sum(dims)
    weights = sum(products.values())
    return ModelShape(sizes.total(), sizes[True], config.hidden_size, weights, products[True], attention, windows)


def training_flops(model: ModelShape, rows: RowLengths) -> float:
    """Return the operations of a forward and backward over ``rows``: each unique token once, without padding.

    Counted as for model FLOPs utilization (https://arxiv.org/abs/2204.02311, appendix B): N weights take 2 N
    operations per token in the forward and twice that in the backward; attention takes operations per attended token.
    Embedding lookups, norms and activations are not counted. No weight gradient is counted for frozen weights. Input
    gradients are counted for every layer, an overestimate below the first trainable weight.
    """
    attended = sum(layers * rows.attended(window) for window, layers in Counter(model.windows).items())
    return 2 * (2 * model.products + model.trained_products) * int(rows.sizes_N.sum()) + 6 * model.attention * attended


def flops_per_row(model: nn.Module, dataset: Any) -> float | None:
    """Return the operations of a forward and backward over an average row of ``dataset``.

    None if unknown: for a stream, a quantized model, or a model other than a causal transformers decoder whose layers
    all attend to all earlier tokens or to a window of them.
    """
    if not isinstance(dataset, Dataset) or getattr(model, "is_quantized", False):
        return None
    try:
        shape, config = model_shape_of(model), model.config.get_text_config()  # type: ignore[union-attr, operator]
        causal = sum(bool(getattr(module, "is_causal", False)) for module in model.modules())
        kinds = set(getattr(config, "layer_types", None) or ())
        is_bidirectional = getattr(config, "use_bidirectional_attention", False)
        if causal != len(shape.windows) or not kinds <= {"full_attention", "sliding_attention"} or is_bidirectional:
            return None
        rows = length_stats(dataset).lengths
    except (AttributeError, TypeError, ValueError):  # a custom config, or other columns
        return None
    return training_flops(shape, rows) / len(rows) if len(rows) else None
