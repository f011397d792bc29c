"""A model by its shapes, and the operations that a training step of it needs, by formula.

Counted are matrix products, two operations for each multiply-add, as everywhere in the literature on model FLOPs
utilisation (https://arxiv.org/abs/2204.02311, appendix B): 2 N a token in the forward of N weights, twice that in the
backward; attention by the tokens that it really sees. Looking up embeddings, norms and activations are not counted.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..parallel.sharding_plan import bare_name
from .lengths import PairLengths


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Args:
        name: As the model has it.
        itemsize: Bytes of a number.
        trained: Whether it gets a gradient.
        kind: "embedding" (looked up), "matrix" (multiplied with every token), "experts" (with the tokens that are
            routed to them), "head" (with scored tokens) or "vector".
        used: The share of it that multiplies a token: of experts those that it is routed to.
        layer: The name of the decoder layer that it is in; empty outside.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    kind: str
    used: float
    layer: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def block(self) -> str:
        """The module that shares its input with it: attention, or a feed-forward block."""
        bare = bare_name(self.name).removesuffix(".weight")
        bare = re.sub(r"\.lora_[AB]\..+$", "", bare)
        return bare.rpartition(".")[0]


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its costs.

    Args:
        weights: All parameters, tied ones once.
        hidden: Features of a token between layers.
        layers: How many decoder layers there are.
        heads: Attention heads of queries.
        head_dims: Features of a query with a key, and with a value.
        windows: Of each layer, how many tokens a token sees; None: all before it.
    """

    weights: tuple[Weight, ...]
    hidden: int
    layers: int
    heads: int
    head_dims: tuple[int, int]
    windows: tuple[int | None, ...]

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def trained_parameters(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.trained)


def read_model(model: Any) -> ModelShape:
    """The shapes of a reward model, which may be on torch's meta device and have adapters."""
    config = model.config.get_text_config()
    layers = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        kind = "embedding" if id(parameter) in tables else _kind(bare_name(name), shape)
        used = _experts_for_a_token(config) / _experts(config, shape) if kind == "experts" else 1.0
        if ".original_module." in name:  # what PEFT keeps of a module that it trains a copy of
            used = 0.0
        layer = next((each for each in layers if name.startswith(f"{each}.")), "")
        weights.append(Weight(name, shape, parameter.element_size(), parameter.requires_grad, kind, used, layer))
    return ModelShape(
        tuple(weights),
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        (getattr(config, "qk_head_dim", None) or head_dim, getattr(config, "v_head_dim", None) or head_dim),
        _windows(config),
    )


def _kind(name: str, shape: tuple[int, ...]) -> str:
    if re.match(r"(score|classifier)\b", name):
        return "head"
    if len(shape) < 2:
        return "vector"
    return "experts" if "experts" in name.split(".") else "matrix"


def _experts_for_a_token(config: Any) -> int:
    return int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1)


def _experts(config: Any, shape: tuple[int, ...]) -> int:
    if len(shape) == 3:  # all experts' weights stacked
        return shape[0]
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 1)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True)
class Flops:
    """Operations of one step, over all chips.

    Args:
        forward: Of matrix products with weights.
        attention: Of queries with keys and of what they weigh with values, forward.
        backward: All of the backward, without what is computed again.
        recomputed: What the remat policy computes again at most.
    """

    forward: float
    attention: float
    backward: float
    recomputed: float

    @property
    def useful(self) -> float:
        """What the step needs; model FLOPs utilisation counts this."""
        return self.forward + self.attention + self.backward

    @property
    def with_remat(self) -> float:
        return self.useful + self.recomputed


def count_flops(model: ModelShape, pairs: PairLengths, remat: str = "none") -> Flops:
    """The operations that a step of ``pairs`` needs: each unique token is computed once, padding never.

    Frozen weights need no gradient, but pass the one of their input on. What lies below the first trained weight is
    counted as if it passed gradients on too, which with adapters in every layer is little.

    Args:
        remat: "full" computes the layers once more; "dots" keeps matrix products, and "none" everything.
    """
    layers = forward = weight_gradients = 0.0
    for weight in model.weights:
        if weight.kind in ("embedding", "vector"):
            continue
        tokens = 2 * len(pairs) if weight.kind == "head" else pairs.tokens
        operations = 2.0 * weight.numel * weight.used * tokens
        forward += operations
        layers += operations if weight.layer else 0.0
        weight_gradients += operations if weight.trained else 0.0
    attention = sum(2.0 * model.heads * sum(model.head_dims) * pairs.attended(window) for window in model.windows)
    return Flops(
        forward=forward,
        attention=attention,
        backward=forward + weight_gradients + 2 * attention,
        recomputed=layers + attention if remat == "full" else 0.0,
    )
