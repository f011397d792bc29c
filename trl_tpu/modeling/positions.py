"""How many positions a model has."""

from typing import Any

from transformers import PreTrainedModel


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has learned in a table; None where it computes them.

    Beyond a table there is nothing to read: the CPU and CUDA stop with an error, XLA reads the last row in silence.
    """
    config: Any = model.config.get_text_config()
    if any(getattr(config, way, None) for way in ("rope_parameters", "relative_attention", "alibi")):
        return None
    return getattr(config, "max_position_embeddings", None)
