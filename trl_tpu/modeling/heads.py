"""Classifiers for causal language models of which transformers has none, made of transformers' own parts.

A classifier is transformers' `GenericForSequenceClassification` (of process rewards `GenericForTokenClassification`)
over the family's pre-trained class, as transformers itself makes it for Llama and many others. It is registered with
transformers' auto class, so that everything that loads by that class finds it.
"""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from ..errors import UserError
from .head_spec import HeadSpec

_CAUSAL = (AutoModelForCausalLM, AutoModelForImageTextToText)
_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_GENERIC = {
    "AutoModelForSequenceClassification": GenericForSequenceClassification,
    "AutoModelForTokenClassification": GenericForTokenClassification,
}
CODE_FILE = "reward_head.py"
_CODE = '''"""The class of this model, for transformers alone: pass `trust_remote_code=True` to `from_pretrained`."""

from transformers.modeling_layers import {generic}
from {config_module} import {config}
from {module} import {family}


class {name}({generic}, {family}):
    config_class = {config}
    base_model_prefix = "{prefix}"
    input_modalities = ("text",)

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # of custom code transformers leaves buffers that are in no checkpoint uninitialized
'''


def auto_class_of(config: PretrainedConfig, outputs: HeadSpec) -> Any:
    """Return transformers' auto class for a reward model of ``config``, which has a class for it from now on.

    Raises:
        UserError: The model is an encoder-decoder, or without attention.
    """
    auto_class, kind = outputs.auto_class, type(config)
    causal = next((each._model_mapping[kind] for each in _CAUSAL if kind in each._model_mapping), None)
    if kind not in auto_class._model_mapping and causal is not None:
        # not by `auto_class.register`, which refuses the class of a multimodal config's text model
        classifier = classifier_of(config, causal, auto_class)
        auto_class._model_mapping.register(kind, classifier, exist_ok=True)
    return auto_class


def classifier_of(config: PretrainedConfig, causal: Any, auto_class: Any) -> type[PreTrainedModel]:
    """Make the classifier of a causal language model's family.

    Args:
        config: Of a causal language model of transformers.
        causal: Its class there.
        auto_class: transformers' auto class of sequence or of token classifiers.

    Raises:
        UserError: The model is an encoder-decoder, or without attention.
    """
    text: Any = config.get_text_config()
    if config.is_encoder_decoder or getattr(text, "num_attention_heads", None) is None:
        reason = "is the decoder of an encoder-decoder" if config.is_encoder_decoder else "has no attention heads"
        raise UserError(f"{causal.__name__} cannot be a reward model, since it {reason}. Choose another model.")
    generic = _GENERIC[auto_class.__name__]
    parents = [each for each in causal.__mro__ if issubclass(each, PreTrainedModel)]
    family = parents[parents.index(PreTrainedModel) - 1]
    name = causal.__name__
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    name = f"{name}{generic.__name__.removeprefix('Generic')}"
    prefix, module = family.base_model_prefix or "model", family.__module__
    text_kind = config.sub_configs.get("text_config")  # of a multimodal model, of whose text model transformers takes
    kind = text_kind if text_kind is causal.config_class else type(config)
    code = {"generic": generic.__name__, "module": module, "family": family.__name__, "name": name, "prefix": prefix}
    attributes = {
        "config_class": kind,
        "base_model_prefix": prefix,
        "input_modalities": ("text",),
        # else transformers takes the class for a user's, and leaves buffers that are in no checkpoint uninitialized
        "__module__": module,
        "save_pretrained": _save_pretrained,
        # a multimodal checkpoint of Llama 4 has its language model under the causal class's own prefix
        "names_in_checkpoint": {} if causal.base_model_prefix == prefix else {f"^{causal.base_model_prefix}\\.": ""},
        "auto_map": {auto_class.__name__: f"{Path(CODE_FILE).stem}.{name}"},
        "code_of_head": _CODE.format(**code, config=kind.__name__, config_module=kind.__module__),
    }
    return type(name, (generic, family), attributes)


def check_only_head_is_missing(name: str, model: PreTrainedModel, missing: set[str]) -> None:
    """Raise UserError if a checkpoint lacks other weights of a model of `classifier_of` than those of its head."""
    lost = sorted(key for key in missing if not key.startswith("score."))
    if lost and hasattr(model, "code_of_head"):
        raise UserError(
            f"{name} lacks {len(lost)} weights of {type(model).__name__}, such as {lost[0]}, and random ones would "
            "take their place. Give the folder of a whole model."
        )


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save as transformers does, and beside it the class, for programs that have no trl_tpu."""
    self.config.auto_map = dict(self.auto_map)
    PreTrainedModel.save_pretrained(self, save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        Path(save_directory, CODE_FILE).write_text(self.code_of_head, encoding="utf-8")
