"""The head that gives rewards, and the positions that a model can read."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ..errors import UserError


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


def find_score_head(model: nn.Module) -> nn.Module | None:
    """Return the score head of ``model``; None if it has none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "score" and hasattr(module, "forward"):
            return module
    return None


def score_head_of(model: nn.Module) -> nn.Module:
    """Return the score head of ``model``.

    Raises:
        UserError: It has none.
    """
    if (head := find_score_head(model)) is None:
        raise UserError(f"{type(model).__name__} has no `score` head whose rewards could be read from packed rows.")
    return head


class _InFloat32:
    """A module's forward in float32, outside autocast; a copy of the module has one with the copy's weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.__wrapped__: Any = module.forward  # bound to the module, and so copied with it

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden, wide = _widen(self._module, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            if wide:  # which calls this once more
                return functional_call(self._module, wide, (hidden, *args), kwargs)
            return self.__wrapped__(hidden, *args, **kwargs)


def keep_heads_in_float32(model: nn.Module) -> None:
    """Compute rewards in float32, whatever type weights and autocast have: bfloat16 would round them to 8 bits."""
    for head in _heads_of(model):
        if not isinstance(head.forward, _InFloat32):
            head.forward = _InFloat32(head)  # type: ignore[method-assign]


def _heads_of(model: Any) -> Iterator[nn.Module]:
    """Yield the score head or, of encoders, which name it otherwise, the modules with weights next to the backbone."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (head := find_score_head(base)) is not None:
        yield head
    elif hasattr(base, getattr(base, "base_model_prefix", None) or " "):
        for name, module in base.named_children():
            if name != base.base_model_prefix and any(True for _ in module.parameters()):
                yield module


def _widen(module: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return hidden states in float32 or, where either has it, in float64, and the weights that are narrower so."""
    parameters = {name: each for name, each in module.named_parameters() if each.is_floating_point()}
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    for parameter in parameters.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    return hidden.to(dtype), {name: each.to(dtype) for name, each in parameters.items() if each.dtype != dtype}
