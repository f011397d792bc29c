"""How many positions a model has, and where it reads them otherwise beside longer sequences."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class ChangingRope:
    """Rotary frequencies that transformers chooses by the longest sequence of a forward, for all that are in it.

    Args:
        limit: For sequences up to this length they are the same.
        by_length: Whether each length beyond has its own (``dynamic``), rather than all of them the same
            (``longrope``). Shorter ones keep those of the longest so far, until one is below the limit.
    """

    limit: int
    by_length: bool

    def group(self, length: int) -> int:
        """Return the same number for lengths that have the same frequencies: 0 for those up to the limit."""
        return 0 if length <= self.limit else length if self.by_length else 1


def changing_rope(model: PreTrainedModel) -> ChangingRope | None:
    """Tell where a model's rotary frequencies change with the longest sequence; None where they never do."""
    config: Any = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):  # of all layers, or of each kind of layers
        kind = each.get("rope_type", "") if isinstance(each, dict) else ""
        if kind == "longrope":
            return ChangingRope(each["original_max_position_embeddings"], by_length=False)
        if "dynamic" in kind:
            return ChangingRope(config.max_position_embeddings, by_length=True)
    return None
