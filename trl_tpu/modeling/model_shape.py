"""The sizes of a model: the positions it can read, its weights, and the operations of its forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..data.measure import measure
from ..packing.shapes import PairLengths
from ..parallel.sharding_plan import bare_name
from .outputs import Outputs


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return for how many tokens a model has learned positions in a table; None where it computes them.

    Beyond a table there is nothing to read: the CPU and CUDA stop with an error, XLA reads the last row in silence.
    A table with a padding row, as RoBERTa's, is used from the row after that one on.
    """
    config: Any = model.config.get_text_config()
    if any(getattr(config, way, None) for way in ("rope_parameters", "relative_attention", "alibi")):
        return None
    count = getattr(config, "max_position_embeddings", None)
    unused = (
        table.padding_idx + 1
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding)
        and name.endswith("position_embeddings")
        and table.num_embeddings == count
        and table.padding_idx is not None
    )
    # XLNet's -1 says that it computes them
    return count - next(unused, 0) if count and count > 0 else None


def position_groups(model: PreTrainedModel) -> Callable[[float], float]:
    """Return a function of a dialogue's length: the same number for those that have the same rotary frequencies.

    It is 0 for those of usual length. transformers chooses the frequencies of the types ``longrope`` and ``dynamic``
    for a whole forward, by its longest dialogue: beyond a limit one set for all, or one for each length, which the
    forwards after it have too, until one is below the limit.
    """
    config: Any = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):  # of all layers, or of each kind of layers
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind == "longrope":
            limit = each["original_max_position_embeddings"]
            return lambda length: int(length > limit)
        if kind == "dynamic":
            return lambda length: length if length > config.max_position_embeddings else 0
    return lambda length: 0


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Args:
        name: As the model has it.
        trained: Whether it gets a gradient.
        kind: "embedding" (looked up), "matrix" (multiplied with every token), "experts" (with the tokens that are
            routed to them) or "vector".
        used: The share of it that multiplies a token: of experts those that it is routed to.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    kind: str
    used: float

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its costs.

    Args:
        weights: All parameters, tied ones once.
        hidden: Features of a token between layers.
        heads: Attention heads of queries.
        head_dims: Features of a query with a key, and with a value.
        windows: For each layer how many tokens a token sees; None: all before it.
    """

    weights: tuple[Weight, ...]
    hidden: int
    heads: int
    head_dims: tuple[int, int]
    windows: tuple[int | None, ...]

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def trained_parameters(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.trained)


def model_without_weights(config: PretrainedConfig, dtype: Any, trust_remote_code: bool = False) -> Any:
    """Return the reward model of a config, on torch's meta device.

    Args:
        dtype: The weights', by torch's name or itself; None for torch's default.
        trust_remote_code: Whether the model may bring its own code.
    """
    outputs = Outputs.of(config)
    config.num_labels = len(outputs.weights)
    with torch.device("meta"):
        return outputs.auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def read_model(model: Any) -> ModelShape:
    """Return the shapes of a reward model, which may be on torch's meta device and have adapters."""
    config = model.config.get_text_config()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = []
    for name, parameter in model.named_parameters():
        kind = "embedding" if id(parameter) in tables else _kind(bare_name(name), parameter.dim())
        used = _routed_share(config) if kind == "experts" else 1.0
        if ".original_module." in name:  # what PEFT keeps of a module that it trains a copy of
            used = 0.0
        weights.append(Weight(name, tuple(parameter.shape), parameter.requires_grad, kind, used))
    return ModelShape(
        tuple(weights),
        config.hidden_size,
        config.num_attention_heads,
        (getattr(config, "qk_head_dim", None) or head_dim, getattr(config, "v_head_dim", None) or head_dim),
        _windows(config),
    )


def _kind(name: str, dims: int) -> str:
    if dims < 2:
        return "vector"
    return "experts" if "experts" in name.split(".") else "matrix"


def _routed_share(config: Any) -> float:
    """Return the share of a layer's experts that a token goes to."""
    routed = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return routed / next((count for name in names if (count := getattr(config, name, None))), routed)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


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
