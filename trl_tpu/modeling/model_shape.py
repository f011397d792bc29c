"""A model by its shapes: what of it decides the costs of a step."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ..parallel.sharding_plan import bare_name
from .outputs import Outputs


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
