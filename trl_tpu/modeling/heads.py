"""Reward model classes of causal language models that have no classifier in transformers.

They are transformers' `GenericForSequenceClassification` (for process rewards `GenericForTokenClassification`) with
the family's pre-trained class, as transformers does for Llama and many others. They are registered with
transformers' auto class: all code that loads by the auto class finds them.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from ..errors import UserError
from .head_spec import HeadSpec

_CAUSAL_AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText)
_GENERIC = {
    "AutoModelForSequenceClassification": GenericForSequenceClassification,
    "AutoModelForTokenClassification": GenericForTokenClassification,
}
CODE_FILE = "reward_head.py"
_CODE = '''"""The class of this model, for use without trl_tpu: pass `trust_remote_code=True` to `from_pretrained`."""

from transformers.modeling_layers import {generic}
from {config_module} import {config}
from {module} import {family}


class {name}({generic}, {family}):
    config_class = {config}
    base_model_prefix = "{prefix}"
    input_modalities = ("text",)

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # for custom code, transformers leaves buffers that are missing in the checkpoint uninitialized
'''


def auto_class_of(config: PretrainedConfig, outputs: HeadSpec) -> Any:
    """Return transformers' auto class for a reward model of ``config``, and register a missing classifier class.

    Raises:
        UserError: The model is an encoder-decoder, or has no attention.
    """
    auto_class, kind = outputs.auto_class, type(config)
    causal = next((auto._model_mapping[kind] for auto in _CAUSAL_AUTO_CLASSES if kind in auto._model_mapping), None)
    if kind not in auto_class._model_mapping and causal is not None:
        # `auto_class.register` would reject the text model's class for a multimodal config
        classifier = classifier_of(config, causal, auto_class)
        auto_class._model_mapping.register(kind, classifier, exist_ok=True)
    return auto_class


def classifier_of(config: PretrainedConfig, causal: Any, auto_class: Any) -> type[PreTrainedModel]:
    """Make the classifier of a causal language model's family.

    Args:
        config: Config of a transformers causal language model.
        causal: The model's causal class in transformers.
        auto_class: transformers' auto class for sequence or token classifiers.

    Raises:
        UserError: The model is an encoder-decoder, or has no attention.
    """
    text: Any = config.get_text_config()
    if config.is_encoder_decoder or getattr(text, "num_attention_heads", None) is None:
        reason = "is the decoder of an encoder-decoder" if config.is_encoder_decoder else "has no attention heads"
        raise UserError(f"{causal.__name__} cannot be a reward model, since it {reason}. Choose another model.")
    generic = _GENERIC[auto_class.__name__]
    parents = [base for base in causal.__mro__ if issubclass(base, PreTrainedModel)]
    family = parents[parents.index(PreTrainedModel) - 1]
    stem = re.sub("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", causal.__name__)
    name = f"{stem}{generic.__name__.removeprefix('Generic')}"
    prefix, module = family.base_model_prefix or "model", family.__module__
    text_kind = config.sub_configs.get("text_config")  # the causal class of a multimodal model may take this config
    kind = text_kind if text_kind is causal.config_class else type(config)
    code = {"generic": generic.__name__, "module": module, "family": family.__name__, "name": name, "prefix": prefix}
    attributes = {
        "config_class": kind,
        "base_model_prefix": prefix,
        "input_modalities": ("text",),
        # transformers takes classes of other modules for custom code, and leaves their non-persistent buffers
        # uninitialized.
        "__module__": module,
        "save_pretrained": _save_pretrained,
        # Llama 4's multimodal checkpoints store the language model under the prefix of the causal class.
        "names_in_checkpoint": {} if causal.base_model_prefix == prefix else {f"^{causal.base_model_prefix}\\.": ""},
        "auto_map": {auto_class.__name__: f"{Path(CODE_FILE).stem}.{name}"},
        "code_of_head": _CODE.format(**code, config=kind.__name__, config_module=kind.__module__),
    }
    return type(name, (generic, family), attributes)


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save as transformers does, and write the class into a file for programs without trl_tpu."""
    self.config.auto_map = dict(self.auto_map)
    PreTrainedModel.save_pretrained(self, save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        Path(save_directory, CODE_FILE).write_text(self.code_of_head, encoding="utf-8")


def model_without_weights(
    config: PretrainedConfig, dtype: Any, trust_remote_code: bool = False, outputs: HeadSpec | None = None
) -> Any:
    """Return the reward model of a config, on torch's meta device.

    Args:
        config: The model's config.
        dtype: Data type of the weights, as a torch dtype or its name; None for torch's default.
        trust_remote_code: Whether the model may run custom code from the Hub.
        outputs: The head specification of the model; None reads it in the config.
    """
    outputs = outputs or HeadSpec.of(config)
    config.num_labels = len(outputs.weights)
    with torch.device("meta"):
        return auto_class_of(config, outputs).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
