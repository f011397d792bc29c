"""What a reward model's outputs are, as its config says: one reward, one of each attribute, or two of each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ..errors import UserError
from .engines import saved_config
from .score_head import score_head_of


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model, and how they make its reward.

    Args:
        attributes: The weights of attributes by their names, in the order of the outputs; none of other models.
        step_separator: What follows each step that the model judges; None where it judges dialogues.
    """

    attributes: Mapping[str, float] = field(default_factory=dict)
    step_separator: str | None = None

    @classmethod
    def of(cls, config: PretrainedConfig | dict[str, Any]) -> "Outputs":
        """Read a model's config."""
        said = config if isinstance(config, dict) else vars(config)
        names = said.get("id2label") or {}
        weights = map(float, said.get("attribute_weights") or ())
        named = zip((names[place] for place in sorted(names, key=int)), weights, strict=False)  # none of most models
        return cls(dict(named), said.get("step_separator"))

    @classmethod
    def saved(cls, model: str | Path) -> "Outputs":
        """Read the config of a saved model, or of that which saved adapters make, in a folder or at the Hub.

        Those of TRL do not say what follows a step: then it is a line break, TRL's default.
        """
        said = saved_config(model)
        if said.get("task_type") == "TOKEN_CLS" or "TokenClassification" in str(said.get("architectures")):
            said.setdefault("step_separator", "\n")
        return cls.of(said)

    @property
    def weights(self) -> tuple[float, ...]:
        """What each counts in the reward; that of a step is the log-odds that it is right."""
        return (-1.0, 1.0) if self.step_separator is not None else tuple(self.attributes.values()) or (1.0,)

    @property
    def auto_class(self) -> Any:
        """The class of transformers that loads such models."""
        return AutoModelForSequenceClassification if self.step_separator is None else AutoModelForTokenClassification


ONE_REWARD = Outputs()


def write_outputs(
    config: PretrainedConfig, names: Sequence[str], weights: Sequence[float] | None, step_separator: str | None
) -> None:
    """Write into a model's config what its outputs are, in place of what it says of the model it begins as.

    Args:
        names: Of attributes; none of other models. Outputs that have these names keep their order.
        weights: Of each; by default those that the config has, or else alike.
        step_separator: As in `Outputs`.

    Raises:
        UserError: The outputs have other names.
    """
    before = Outputs.of(config).attributes
    if all(name.startswith("LABEL_") for name in before):  # transformers' names of what has none
        before = dict(zip(names, before.values(), strict=True)) if len(before) == len(names) else {}
    if before and names and set(before) != set(names):
        raise UserError(
            f"The model's outputs are the attributes {[*before]}, and attributes={[*names]} are others. Set "
            f"attributes={[*before]} to train them further, or begin from a model without attributes."
        )
    for name in ("attribute_weights", "step_separator"):
        vars(config).pop(name, None)
    if names:
        given = dict(zip(names, weights, strict=True)) if weights else before or dict.fromkeys(names, 1 / len(names))
        names = [*before] or names
        config.attribute_weights = [given[name] for name in names]
        config.id2label, config.label2id = dict(enumerate(names)), {name: place for place, name in enumerate(names)}
    if step_separator is not None:
        config.step_separator = step_separator


def fold_attributes(model: PreTrainedModel, outputs: Outputs) -> None:
    """Give a model of attributes one output, the reward that they make, for readers that know one number.

    Its score head has to be a linear layer, as all are in transformers. The weights of other models stay.
    """
    write_outputs(model.config, (), None, outputs.step_separator)
    if not outputs.attributes:
        return
    weights_A = torch.tensor(outputs.weights, dtype=torch.float64)
    for parameter in score_head_of(model).parameters():
        parameter.data = (weights_A @ parameter.data.double())[None].to(parameter.dtype)
    model.config.num_labels = 1
