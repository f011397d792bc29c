"""The head of a reward model, and the config fields that give its outputs a meaning, for training and servers."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file

from ..data.kinds import labels_as
from ..errors import UserError


def find_score_head(model: nn.Module) -> nn.Module | None:
    """Return the score head of ``model``; None if it has none."""
    return next((module for name, module in model.named_modules() if name.rpartition(".")[2] == "score"), None)


def is_peft_model(model: nn.Module) -> bool:
    """Return whether the model has peft adapters, without importing peft: no such model exists before its import."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def without_adapters(model: nn.Module) -> Any:
    """Return the transformers model inside a peft model, or ``model`` itself without adapters."""
    return model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]


def find_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Return the heads of a model by name: the `score` head, or else all modules next to the backbone.

    Encoders have other names for their heads.
    """
    if (score := find_score_head(model)) is not None:
        return {name: module for name, module in model.named_modules() if module is score}
    modules, backbone = dict(model.named_children()), getattr(model, "base_model_prefix", None)
    return {name: head for name, head in modules.items() if name != backbone} if backbone in modules else {}


def keep_heads_in_float32(model: nn.Module) -> None:
    """Compute rewards in float32 for any dtype of weights and autocast: bfloat16 would round rewards to 8 bits."""
    for head in find_heads(without_adapters(model)).values():
        if any(True for _ in head.parameters()):
            wrap_forward(head, _compute_in_float32, head)


def wrap_forward(module: nn.Module, function: Callable[..., Any], *first: Any) -> None:
    """Replace a module's forward by ``function``, unless ``function`` already replaces it.

    ``function`` gets the module's original forward, then ``first``, then the arguments of the call. In a deepcopy of
    the module, it gets the copy's forward.
    """
    if not is_wrapped(module, function):
        forward = module.forward
        module.forward = partial(function, forward, *first)
        module.forward.__wrapped__ = forward  # type: ignore[attr-defined]  # `user_code_in` inspects it


def is_wrapped(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Return whether `wrap_forward` replaced the module's forward by ``function``."""
    return getattr(module.forward, "func", None) is function


def _compute_in_float32(
    forward: Callable[..., Any], module: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute a module's forward without autocast, in float32, or in float64 if its input or weights are float64."""
    parameters = {name: weight for name, weight in module.named_parameters() if weight.is_floating_point()}
    dtypes = [weight.dtype for weight in parameters.values()]
    dtype = reduce(torch.promote_types, dtypes, torch.promote_types(hidden.dtype, torch.float32))
    hidden, wide = hidden.to(dtype), {name: w.to(dtype) for name, w in parameters.items() if w.dtype != dtype}
    with torch.autocast(hidden.device.type, enabled=False):
        if wide:  # calls this function again, with converted weights
            return functional_call(module, wide, (hidden, *args), kwargs)
        return forward(hidden, *args, **kwargs)


@dataclass(frozen=True)
class HeadSpec:
    """The outputs of a model, and their weights in its reward.

    Args:
        attributes: Weight of each attribute by name, in the order of the outputs; empty without attributes.
        step_separator: The text after each step of process rewards; None for rewards of conversations.
        labels_as: How evaluations read the labels of answers or steps, see `trl_tpu.data.kinds`; None as usual.
    """

    attributes: Mapping[str, float] = field(default_factory=dict)
    step_separator: str | None = None
    labels_as: str | None = None

    @classmethod
    def of(cls, config: PretrainedConfig | dict[str, Any]) -> "HeadSpec":
        """Read the head specification in a model's config."""
        values = config if isinstance(config, dict) else vars(config)
        names = values.get("id2label") or {}
        weights = map(float, values.get("attribute_weights") or ())
        # most models have labels, but no attribute weights
        attributes = zip((names[place] for place in sorted(names, key=int)), weights, strict=False)
        return cls(dict(attributes), values.get("step_separator"), values.get("labels_as"))

    @classmethod
    def for_settings(cls, args: Any) -> "HeadSpec":
        """Return the head specification that a `RewardConfig` asks for. Attributes have equal weights by default."""
        names = args.attributes or []
        weights = args.attribute_weights or [1 / len(names) for _ in names]
        return cls(dict(zip(names, weights, strict=True)), args.step_separator, labels_as(args))

    @classmethod
    def saved(cls, model: str | Path) -> "HeadSpec":
        """Read the head specification of a saved model or of saved adapters, in a folder or on the Hub.

        The step separator of a process reward model defaults to a line break, TRL's default.
        """
        config = saved_config(model)
        if config.get("task_type") == "TOKEN_CLS" or "TokenClassification" in str(config.get("architectures")):
            config.setdefault("step_separator", "\n")
        return cls.of(config)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the outputs in the reward. A step's reward is the log-odds that the step is correct."""
        return (-1.0, 1.0) if self.step_separator is not None else tuple(self.attributes.values()) or (1.0,)

    @property
    def auto_class(self) -> Any:
        """transformers' auto class for models with these outputs."""
        if self.step_separator is None:
            return transformers.AutoModelForSequenceClassification
        return transformers.AutoModelForTokenClassification


ONE_REWARD = HeadSpec()


def write_head_spec(config: PretrainedConfig, spec: HeadSpec, *, keeps_weights: bool = False) -> None:
    """Write a head specification into a model's config, in place of the specification of its base model.

    Args:
        config: The config to change, in place.
        spec: The specification. If the config has the same attributes, their order in the config is kept.
        keeps_weights: Whether to keep the config's weights of these attributes, if it has any.

    Raises:
        UserError: The config has attributes with other names.
    """
    before, names = HeadSpec.of(config).attributes, [*spec.attributes]
    if all(name.startswith("LABEL_") for name in before):  # transformers' default names
        before = dict(zip(names, before.values(), strict=True)) if len(before) == len(names) else {}
    if before and names and set(before) != set(names):
        raise UserError(
            f"The model's outputs are the attributes {[*before]}, but attributes={names} differ. Set "
            f"attributes={[*before]} to train them further, or start from a model without attributes."
        )
    vars(config).pop("attribute_weights", None)
    if names:
        weights = before if before and keeps_weights else spec.attributes
        names = [*before] or names
        config.attribute_weights = [weights[name] for name in names]
        config.id2label, config.label2id = dict(enumerate(names)), {name: place for place, name in enumerate(names)}
    for name in ("step_separator", "labels_as"):
        vars(config).pop(name, None)
        if (value := getattr(spec, name)) is not None:
            setattr(config, name, value)


def check_num_labels(model: Any, outputs: HeadSpec = ONE_REWARD) -> None:
    """Check that the model has one output per attribute, or one output without attributes.

    Process rewards need a token classifier with two labels.

    Raises:
        UserError: The model has another number or kind of outputs.
    """
    needed, num_labels, kind = len(outputs.weights), getattr(model.config, "num_labels", None), type(model).__name__
    is_other_task = outputs.step_separator is not None and "TokenClassification" not in kind
    if num_labels != needed or is_other_task:
        raise UserError(
            f"The model is a {kind} with `num_labels={num_labels}`, but reward models require `num_labels={needed}`. "
            f"Load it by `{outputs.auto_class.__name__}.from_pretrained(..., num_labels={needed})`, or pass its name."
        )


def fold_attributes(model: PreTrainedModel, outputs: HeadSpec) -> None:
    """Replace a model's attribute outputs by one output, their weighted sum, for programs that read one reward.

    The score head must be linear, as in transformers. Models without attributes keep their weights.
    """
    write_head_spec(model.config, replace(outputs, attributes={}))
    if not outputs.attributes:
        return
    head: Any = find_score_head(model)
    weights_A = torch.tensor(outputs.weights, dtype=torch.float64)
    for parameter in head.parameters():
        parameter.data = (weights_A @ parameter.data.double())[None].to(parameter.dtype)
    model.config.num_labels = 1


#: Activation in the config, read by vLLM's `/score` and sentence-transformers' `CrossEncoder`.
IDENTITY = "torch.nn.modules.linear.Identity"
#: Config file in a folder of adapters. With a `config.json`, transformers would look for a whole model's weights.
BASE_CONFIG = "base_model_config.json"


@dataclass(frozen=True)
class RewardScale:
    """Mean and standard deviation of a model's rewards, for servers that return (reward - mean) / std.

    Args:
        mean: Mean of the rewards.
        std: Population standard deviation of the rewards.
        rewards: Number of rewards.
        of: Name of the rewards' dataset, for the model card.
    """

    mean: float
    std: float
    rewards: int = 0
    of: str = ""


def set_inference_metadata(config: PretrainedConfig) -> None:
    """Write inference metadata into a model's config: servers then return its one output without an activation.

    transformers' pipeline and vLLM's `/classify` read ``problem_type``. It does not change training, since the trainer
    passes no labels to the model. vLLM reads ``head_dtype``. Existing values are kept. Process reward models have two
    outputs and get no metadata.
    """
    if getattr(config, "step_separator", None) is not None:
        return
    settings: Any = getattr(config, "sentence_transformers", None) or {}
    config.sentence_transformers = {"activation_fn": IDENTITY} | settings
    for name, value in (("problem_type", "regression"), ("head_dtype", "float32")):
        if getattr(config, name, None) is None:
            setattr(config, name, value)


def set_reward_normalization(config: PretrainedConfig, scale: RewardScale | None) -> None:
    """Write ``mean`` and ``std`` into a config, for OpenRLHF to normalize rewards; None removes them.

    The config's ``__dict__`` is replaced at once: a thread that saves the model may be iterating over the old one.
    """
    attributes = {name: value for name, value in vars(config).items() if name not in ("mean", "std")}
    if scale is not None and (config.num_labels == 1 or hasattr(config, "attribute_weights")):
        attributes |= {"mean": scale.mean, "std": scale.std}
    config.__dict__ = attributes


_HUB_ARGUMENTS = {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"}


def hub_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that locate files; they apply to model and tokenizer."""
    return {name: kwargs[name] for name in _HUB_ARGUMENTS & kwargs.keys()}


def may_be_on_the_hub(name: str) -> bool:
    """Return whether a name has the form of a Hub id, and its first part is not a local file or folder."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None and not os.path.exists(name.partition("/")[0])


def find_file(model: str | Path, name: str, **where: Any) -> str | None:
    """Return the path of a file of a model, in a folder or on the Hub; None if the model has no such file.

    Args:
        model: Folder or Hub id.
        name: The file's name.
        **where: The result of `hub_settings`.
    """
    return cached_file(str(model), name, _raise_exceptions_for_missing_entries=False, **where)


def saved_config(model: str | Path) -> dict[str, Any]:
    """Return the config of a saved model, or of the reward model of saved adapters, in a folder or on the Hub.

    For adapters of another program, return the adapters' config. Without any config, return an empty dict.
    """
    names = (BASE_CONFIG, CONFIG_NAME, ADAPTER_CONFIG_NAME)
    files = (find_file(model, name) for name in names)
    return next((json.loads(Path(file).read_text(encoding="utf-8")) for file in files if file), {})


def saved_scale(model: str | Path) -> RewardScale | None:
    """Return the reward scale in a saved config; None unless it has a mean and a positive standard deviation."""
    config = saved_config(model)
    return RewardScale(config["mean"], config["std"]) if config.get("std", 0) > 0 else None
