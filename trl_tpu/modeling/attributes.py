"""Several attributes of answers: a model with an output for each, and the weights that make them one reward."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file

from .engines import BASE_CONFIG
from .score_head import score_head_of

_CONFIGS = (BASE_CONFIG, CONFIG_NAME)


def attributes_of(config: PretrainedConfig | dict[str, Any]) -> dict[str, float]:
    """Return the weights of a model's attributes by their names, in the order of its outputs; none of other models."""
    said = config if isinstance(config, dict) else vars(config)
    names = {int(place): name for place, name in (said.get("id2label") or {}).items()}
    return {names[place]: float(weight) for place, weight in enumerate(said.get("attribute_weights") or ())}


def saved_attributes(model: str | Path) -> dict[str, float]:
    """Return the same of a saved model, or of that which saved adapters make, in a folder or at the Hub."""
    files = (cached_file(str(model), name, _raise_exceptions_for_missing_entries=False) for name in _CONFIGS)
    return next((attributes_of(json.loads(Path(file).read_text("utf-8"))) for file in files if file), {})


def name_attributes(config: PretrainedConfig, names: Sequence[str], weights: Sequence[float] | None) -> None:
    """Write into a model's config what its outputs are, and how they make the reward.

    Args:
        names: In the order of the outputs.
        weights: Of each; by default those that the config has, or else alike.
    """
    config.attribute_weights = list(weights or attributes_of(config).values()) or [1 / len(names)] * len(names)
    config.id2label, config.label2id = dict(enumerate(names)), {name: place for place, name in enumerate(names)}


def fold_attributes(model: PreTrainedModel, attributes: Mapping[str, float]) -> None:
    """Give a model of attributes one output, the reward that they make, for readers that know one number.

    Its score head has to be a linear layer, as all are in transformers.

    Args:
        attributes: Their weights; none of another model, which stays as it is.
    """
    if not attributes:
        return
    weights_A = torch.tensor(list(attributes.values()), dtype=torch.float64)
    for parameter in score_head_of(model).parameters():
        parameter.data = (weights_A @ parameter.data.double())[None].to(parameter.dtype)
    model.config.num_labels = 1
    vars(model.config).pop("attribute_weights", None)
