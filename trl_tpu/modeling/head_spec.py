"""The head of a reward model, and what its outputs mean, by its config: for training and for inference servers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file

from ..errors import UserError


def find_score_head(model: nn.Module) -> nn.Module | None:
    """Return the score head of ``model``; None if it has none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "score" and hasattr(module, "forward"):
            return module
    return None


def keep_heads_in_float32(model: nn.Module) -> None:
    """Compute rewards in float32, whatever type weights and autocast have: bfloat16 would round them to 8 bits.

    Encoders name their heads otherwise: of models without a `score` head, all modules next to the backbone count.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    backbone, heads = getattr(base, "base_model_prefix", None) or " ", [find_score_head(base)]
    if heads == [None] and hasattr(base, backbone):
        heads = [module for name, module in base.named_children() if name != backbone]
    for head in heads:
        if head is None or not any(True for _ in head.parameters()):
            continue
        wrap_forward(head, _compute_in_float32, head)


def wrap_forward(module: nn.Module, function: Callable[..., Any], *first: Any) -> None:
    """Let ``function`` take the calls of a module; once, however often this is called.

    It is given the module's own forward, ``first``, and what the module is called with. A deepcopy of the module has
    its own.
    """
    if not is_wrapped(module, function):
        own = module.forward
        module.forward = partial(function, own, *first)
        module.forward.__wrapped__ = own  # type: ignore[attr-defined]  # `check_unmodified` looks behind it


def is_wrapped(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Tell whether ``function`` takes the calls of a module, by `wrap_forward`."""
    return getattr(module.forward, "func", None) is function


def _compute_in_float32(
    forward: Callable[..., Any], module: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute a module's forward outside autocast, in float32 or, where states or weights have it, in float64."""
    parameters = {name: each for name, each in module.named_parameters() if each.is_floating_point()}
    dtypes = [each.dtype for each in parameters.values()]
    dtype = reduce(torch.promote_types, dtypes, torch.promote_types(hidden.dtype, torch.float32))
    hidden, wide = hidden.to(dtype), {name: each.to(dtype) for name, each in parameters.items() if each.dtype != dtype}
    with torch.autocast(hidden.device.type, enabled=False):
        if wide:  # calls this function again, with wide weights
            return functional_call(module, wide, (hidden, *args), kwargs)
        return forward(hidden, *args, **kwargs)


@dataclass(frozen=True)
class HeadSpec:
    """The outputs of a model, and how they make its reward.

    Args:
        attributes: The weights of attributes by name, in the order of the outputs; empty without attributes.
        step_separator: The text after each step of process rewards; None for rewards of conversations.
    """

    attributes: Mapping[str, float] = field(default_factory=dict)
    step_separator: str | None = None

    @classmethod
    def of(cls, config: PretrainedConfig | dict[str, Any]) -> "HeadSpec":
        """Read a model's config."""
        said = config if isinstance(config, dict) else vars(config)
        names = said.get("id2label") or {}
        weights = map(float, said.get("attribute_weights") or ())
        named = zip((names[place] for place in sorted(names, key=int)), weights, strict=False)  # none of most models
        return cls(dict(named), said.get("step_separator"))

    @classmethod
    def saved(cls, model: str | Path) -> "HeadSpec":
        """Read the config of a model or of adapters, in a folder or at the Hub.

        Without a step separator in the config of a process reward model, it is a line break, TRL's default.
        """
        said = saved_config(model)
        if said.get("task_type") == "TOKEN_CLS" or "TokenClassification" in str(said.get("architectures")):
            said.setdefault("step_separator", "\n")
        return cls.of(said)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the outputs in the reward. A step's reward is the log-odds that it is right."""
        return (-1.0, 1.0) if self.step_separator is not None else tuple(self.attributes.values()) or (1.0,)

    @property
    def auto_class(self) -> Any:
        """transformers' class for such models."""
        return AutoModelForSequenceClassification if self.step_separator is None else AutoModelForTokenClassification


ONE_REWARD = HeadSpec()


def write_head_spec(
    config: PretrainedConfig, names: Sequence[str], weights: Sequence[float] | None, step_separator: str | None
) -> None:
    """Write the meaning of the outputs into a model's config, replacing that of the model it was made from.

    Args:
        config: Changed in place.
        names: Names of the attributes; empty without attributes. Outputs that have these names keep their order.
        weights: A weight for each name; None for the config's own, or else equal weights.
        step_separator: As in `HeadSpec`.

    Raises:
        UserError: The outputs have other names.
    """
    before = HeadSpec.of(config).attributes
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


def fold_attributes(model: PreTrainedModel, outputs: HeadSpec) -> None:
    """Replace a model's attributes by their weighted sum, one output, for programs that read one reward.

    The score head must be linear, as in transformers. Models without attributes keep their weights.

    Raises:
        UserError: There are attributes, and no `score` head.
    """
    write_head_spec(model.config, (), None, outputs.step_separator)
    if not outputs.attributes:
        return
    if (head := find_score_head(model)) is None:
        raise UserError(f"{type(model).__name__} has no `score` head into which attribute_weights could be folded.")
    weights_A = torch.tensor(outputs.weights, dtype=torch.float64)
    for parameter in head.parameters():
        parameter.data = (weights_A @ parameter.data.double())[None].to(parameter.dtype)
    model.config.num_labels = 1


#: For vLLM's `/score` and for sentence-transformers' `CrossEncoder`.
IDENTITY = "torch.nn.modules.linear.Identity"
#: Beside adapters. transformers takes a folder with a `config.json` for a whole model, and looks for its weights.
BASE_CONFIG = "base_model_config.json"
_OF_PHI3 = {"rope_type", "type", "short_factor", "long_factor", "original_max_position_embeddings"}


@dataclass(frozen=True)
class RewardScale:
    """Mean and standard deviation of a model's rewards, for servers that return (reward - mean) / std.

    Args:
        mean: Mean of the rewards.
        std: Their population standard deviation.
        rewards: Number of rewards.
        of: Name of the data, for the model card.
    """

    mean: float
    std: float
    rewards: int = 0
    of: str = ""


def set_inference_metadata(config: PretrainedConfig) -> None:
    """Write inference metadata into a model's config: its one output is the reward, without an activation.

    transformers' pipeline and vLLM's `/classify` read ``problem_type``. It does not change training, which passes no
    labels. vLLM reads ``head_dtype``. Values that are set already stay. Process reward models, with two outputs, get
    no metadata.
    """
    if getattr(config, "step_separator", None) is not None:
        return
    if config.problem_type is None:
        config.problem_type = "regression"
    own: Any = getattr(config, "sentence_transformers", None) or {}
    config.sentence_transformers = {"activation_fn": IDENTITY} | own
    if getattr(config, "head_dtype", None) is None:
        config.head_dtype = "float32"


def set_reward_normalization(config: PretrainedConfig, scale: RewardScale | None) -> None:
    """Write ``mean`` and ``std`` into a config, for OpenRLHF to normalize rewards; None removes them.

    All of the config's attributes are replaced at once: a thread that saves the model may be iterating over them.
    """
    attributes = {name: value for name, value in vars(config).items() if name not in ("mean", "std")}
    if scale is not None and (config.num_labels == 1 or hasattr(config, "attribute_weights")):
        attributes |= {"mean": scale.mean, "std": scale.std}
    config.__dict__ = attributes


_OF_FILES = {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"}


def hub_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that locate files: the tokenizer's too."""
    return {name: kwargs[name] for name in _OF_FILES & kwargs.keys()}


def saved_config(model: str | Path) -> dict[str, Any]:
    """Return the config of a saved model, or of the model that saved adapters make, in a folder or at the Hub.

    Adapters of another program have only their own config. Empty where there is none.
    """
    names = (BASE_CONFIG, CONFIG_NAME, ADAPTER_CONFIG_NAME)
    files = (cached_file(str(model), name, _raise_exceptions_for_missing_entries=False) for name in names)
    return next((json.loads(Path(file).read_text(encoding="utf-8")) for file in files if file), {})


def saved_scale(model: str | Path) -> RewardScale | None:
    """Return the reward scale in a saved config; None without a mean and a positive standard deviation."""
    config = saved_config(model)
    mean, std = config.get("mean"), config.get("std")
    if not isinstance(mean, int | float) or not isinstance(std, int | float) or not std > 0:
        return None
    return RewardScale(float(mean), float(std))


def write_old_names(folder: str | Path) -> None:
    """Rewrite a saved model's or tokenizer's config for transformers before 5.

    Names in the tokenizer's config that only transformers 5 reads are replaced: it reads the old ones too.
    """
    _write_old_rope_names(folder)
    path = Path(folder, "tokenizer_config.json")
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.get("tokenizer_class") == "TokenizersBackend":
        # by default the old class also makes token_type_ids, which most models reject
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config:
        path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_old_rope_names(folder: str | Path) -> None:
    """Add the names of transformers before 5 for rotary positions to a saved config, next to ``rope_parameters``.

    Those versions, one of which rewardbench has, silently take 10,000 for a base that they do not find, and compute
    other rewards. transformers 5 reads either. Bases by kind of layer had no common name, and are left out.
    """
    path = Path(folder, CONFIG_NAME)
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or "rope_theta" in config:
        return
    config["rope_theta"] = rope["rope_theta"]
    if config.get("model_type") == "gpt_neox":  # it had names of its own
        config |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    elif "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        own = ("rope_theta", "partial_rotary_factor")
        scaling = {name: value for name, value in rope.items() if name not in own}
        if config.get("model_type") == "phi3" and scaling.keys() <= _OF_PHI3:
            # It took these three and no others: one with a factor of its own is refused there, rather than misread.
            scaling = {"type": rope["rope_type"]} | {name: rope[name] for name in ("short_factor", "long_factor")}
        config["rope_scaling"] = scaling
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
