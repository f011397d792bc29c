"""How many positions a model has, and which dialogues read others than beside longer ones."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel


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
