"""Reward model classes of checkpoints, and their weights: all of them, or an error; only a head may be new.

Causal language models without a classifier in transformers get transformers' `GenericForSequenceClassification` (for
process rewards `GenericForTokenClassification`) with the family's pre-trained class, as transformers does for Llama
and many others. These classes are registered with transformers' auto class: all code that loads by the auto class
finds them.
"""

import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_utils import load_state_dict
from transformers.utils import CONFIG_NAME
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

from ..errors import UserError, explaining
from ..parallel.mesh import MeshShape
from ..parallel.shard import distribute, fill
from .head_spec import HeadSpec, find_file, find_heads, hub_settings

logger = logging.getLogger(__name__)

_CAUSAL_AUTO_CLASSES = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
CODE_FILE = "reward_head.py"
_CODE = '''"""The class of this model, for use without trl_tpu: pass `trust_remote_code=True` to `from_pretrained`."""

from transformers.modeling_layers import {generic.__name__}
from {config.__module__} import {config.__name__}
from {family.__module__} import {family.__name__}


class {name}({generic.__name__}, {family.__name__}):
    config_class = {config.__name__}
    base_model_prefix = "{prefix}"
    input_modalities = ("text",)

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # for custom code, transformers leaves buffers that are missing in the checkpoint uninitialized
'''

_WEIGHT, _BIAS = "score.weight", "score.bias"
_HEAD_FILES = ("value_head.safetensors", "value_head.bin")  # LLaMA-Factory's
_HEAD_NAME = re.compile(r"v_head|value|score|reward|rm_head|regress|classifi|critic|^head$")
_HEAD_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_MODEL_FILE = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)")
_PRETRAINING_HEAD = r"(lm_head|cls|sop_classifier|discriminator_predictions)\."
# the second kind are layers such as those for multi-token prediction
_NO_HEAD = re.compile(rf"{_PRETRAINING_HEAD}|(.*\.)?layers\.")


def auto_class_of(config: PretrainedConfig, outputs: HeadSpec) -> Any:
    """Return transformers' auto class for a reward model of ``config``, and register a missing classifier class.

    Raises:
        UserError: The model is an encoder-decoder, or has no attention.
    """
    auto_class, kind = outputs.auto_class, type(config)
    causal = next((auto._model_mapping[kind] for auto in _CAUSAL_AUTO_CLASSES if kind in auto._model_mapping), None)
    if kind not in auto_class._model_mapping and causal is not None:
        # `auto_class.register` would reject the text model's class for a multimodal config
        auto_class._model_mapping.register(kind, classifier_of(config, causal, outputs), exist_ok=True)
    return auto_class


def classifier_of(config: PretrainedConfig, causal: Any, outputs: HeadSpec) -> type[PreTrainedModel]:
    """Make the classifier of a causal language model's family.

    Args:
        config: Config of a transformers causal language model.
        causal: The model's causal class in transformers.
        outputs: The head specification of the model.

    Raises:
        UserError: The model is an encoder-decoder, or has no attention.
    """
    text: Any = config.get_text_config()
    if config.is_encoder_decoder or getattr(text, "num_attention_heads", None) is None:
        reason = "is the decoder of an encoder-decoder" if config.is_encoder_decoder else "has no attention heads"
        raise UserError(f"{causal.__name__} cannot be a reward model, since it {reason}. Choose another model.")
    generic = GenericForSequenceClassification if outputs.step_separator is None else GenericForTokenClassification
    parents = [base for base in causal.__mro__ if issubclass(base, PreTrainedModel)]
    family = parents[parents.index(PreTrainedModel) - 1]
    stem = re.sub("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", causal.__name__)
    name = f"{stem}{generic.__name__.removeprefix('Generic')}"
    prefix = family.base_model_prefix or "model"
    text_kind = config.sub_configs.get("text_config")  # the causal class of a multimodal model may take this config
    kind = text_kind if text_kind is causal.config_class else type(config)
    attributes = {
        "config_class": kind,
        "base_model_prefix": prefix,
        "input_modalities": ("text",),
        # transformers takes classes of other modules for custom code, and leaves their non-persistent buffers
        # uninitialized.
        "__module__": family.__module__,
        "save_pretrained": _save_pretrained,
        # Llama 4's multimodal checkpoints store the language model under the prefix of the causal class.
        "names_in_checkpoint": {} if causal.base_model_prefix == prefix else {f"^{causal.base_model_prefix}\\.": ""},
        "auto_map": {outputs.auto_class.__name__: f"{Path(CODE_FILE).stem}.{name}"},
        "code_of_head": _CODE.format(generic=generic, config=kind, family=family, name=name, prefix=prefix),
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


# ---- weights


def load_classifier(
    name: str, outputs: HeadSpec, *, in_files: bool = False, mesh: MeshShape | None = None, **kwargs: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model with ``outputs``, and return it with transformers' loading info: missing and unexpected weights.

    Only weights of the head, and of encoders' pooler before it, may be missing: they are new.

    Args:
        name: A Hub id or folder.
        outputs: The head specification of the model.
        in_files: Leave the backbone's weights, except the input embeddings, in the checkpoint's files. `place_model`
            then reads module by module; call `remove_offload_hooks` after it. Weights that transformers converts while
            loading (such as experts stored one by one) are loaded to the host anyway.
        mesh: The mesh over whose processes the model will be split; a model that cannot be is rejected before loading.
        **kwargs: Arguments of ``from_pretrained``.

    Raises:
        UserError: The checkpoint does not exist, a file is broken, or weights are missing or have another shape.
    """
    source = logging.getLogger(PreTrainedModel.__module__)
    with explaining(f"{name} cannot be loaded as a reward model"), _without_messages(source, "LOAD REPORT"):
        for index in Path(name).glob("*.index.json"):
            for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values():
                if Path(file).name != file:  # transformers would read it
                    raise UserError(f"{index} lists {file!r}, a file outside its folder. Correct the index.")
        trusts_code = kwargs.get("trust_remote_code", False)
        config = AutoConfig.from_pretrained(name, trust_remote_code=trusts_code, **hub_settings(kwargs))
        kinds, auto_class = str(config.architectures), auto_class_of(config, outputs)
        if mesh is not None:
            with torch.random.fork_rng(devices=[]):  # modeling code may draw numbers, also on the meta device
                distribute(model_without_weights(copy.deepcopy(config), None, trusts_code, outputs), mesh)
        if mapping := getattr(auto_class._model_mapping.get(type(config), None), "names_in_checkpoint", None):
            kwargs.setdefault("key_mapping", mapping)
        random_state, loaded = torch.get_rng_state(), None
        in_files = in_files and not kwargs.keys() & {"quantization_config", "ignore_mismatched_sizes"}
        settings = kwargs | {"ignore_mismatched_sizes": True}  # they are checked here
        if in_files and (loaded := _load_in_files(name, outputs, settings)) is None:
            torch.set_rng_state(random_state)  # draw the same new head as without this attempt
            logger.warning(f"{name} is loaded into host memory as a whole: its files do not match the model.")
        model, info = loaded or auto_class.from_pretrained(name, output_loading_info=True, **settings)
        _check_weights(name, model, info, kinds, kwargs)
        if not info["missing_keys"] and not info["mismatched_keys"]:
            torch.set_rng_state(random_state)  # a head was drawn before it was read
    # every new reward model has a new head in the place of the language model's
    unexpected = {key for key in info["unexpected_keys"] if not re.match(_PRETRAINING_HEAD, key)}
    missing = {key for key in info["missing_keys"] if ".pooler." in key}
    every = dict.fromkeys((each.name for each in fields(LoadStateDictInfo)), set[str]()) | info
    report = every | {"unexpected_keys": unexpected, "missing_keys": missing}
    log_state_dict_report(model, name, True, LoadStateDictInfo(**report), source)
    return model, info


@contextmanager
def _without_messages(source: logging.Logger, text: str) -> Iterator[None]:
    """Drop a logger's messages that contain ``text``, while the context is open."""

    def is_other(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    source.addFilter(is_other)
    try:
        yield
    finally:
        source.removeFilter(is_other)


def _check_weights(
    name: str, model: PreTrainedModel, info: dict[str, Any], kinds: str, kwargs: Mapping[str, Any]
) -> None:
    """Reject missing weights except those of a new head, and read a head with another name.

    Args:
        name: A Hub id or folder.
        model: The loaded model.
        info: transformers' loading info. The weights of a head with another name are removed from it.
        kinds: The checkpoint's ``architectures``.
        kwargs: Arguments of ``from_pretrained``.

    Raises:
        UserError: A weight is missing or has another shape, or the checkpoint has a head that cannot be read.
    """
    replaced = sorted(info["mismatched_keys"])
    if replaced and not kwargs.get("ignore_mismatched_sizes"):
        key, stored, needed = replaced[0]
        raise UserError(
            f"{name} stores {key} as {[*stored]}, but a reward model with num_labels={model.config.num_labels} needs "
            f"{[*needed]}. Choose a model with as many outputs, or the language model that it was trained from."
        )
    # masked language models have no pooler
    paths = {*find_heads(model), *(path for path, _ in model.named_modules() if path.endswith(".pooler"))}
    heads = [{key for key in model.state_dict() if key.startswith(f"{path}.")} for path in paths]
    new_head = info["missing_keys"] & set().union(*heads)
    is_partial = any(head & new_head not in (set(), head) for head in heads)
    unread = _read_head(name, model, info, new_head, kwargs) if new_head and not replaced else set()
    new_head &= info["missing_keys"]
    if unread or (not replaced and (is_partial or re.search("Classification|Reward", kinds))):
        new_head = set()
    if lost := sorted(info["missing_keys"] - new_head):
        raise UserError(
            f"{name} (architectures {kinds}) lacks {len(lost)} weights of {type(model).__name__}, such as {lost[0]}, "
            f"and they would be random. Its other tensors: {sorted(unread or info['unexpected_keys'])[:20]}. Pass a "
            "complete model. A head with another name must be the only one, fit score.weight, and have no other bias."
        )


def _read_head(
    name: str, model: PreTrainedModel, info: dict[str, Any], new_head: Set[str], kwargs: Mapping[str, Any]
) -> set[str]:
    """Read a head that is stored under another name or in another file, and remove it from the loading info.

    A stored head is an unexpected weight that is named as a head, or lies in a file with such a name, or has one
    output or as many as the model. It is read if it is the only one, has the right shape, and is alone except for a
    bias. A model's head without a bias takes a bias of zeros only. Heads other than `score` are not linear functions
    of the last hidden state.

    Returns:
        The stored heads, if they were not read.
    """
    files = [find_file(name, file, **hub_settings(kwargs)) for file in (CONFIG_NAME, *_HEAD_FILES)]
    folder = Path(str(files[0])).parent
    prefix, labels = f"{model.base_model_prefix}.", int(model.config.num_labels or 0)
    unexpected = {key.removeprefix(prefix) for key in info["unexpected_keys"] if not _NO_HEAD.match(key)}
    tensors = dict[str, torch.Tensor]()
    for file in folder.iterdir():
        is_head = file.suffix in _HEAD_SUFFIXES and _HEAD_NAME.search(file.stem) is not None
        if is_head or (unexpected and _MODEL_FILE.fullmatch(file.name)):
            stored = {key.removeprefix(prefix): tensor for key, tensor in load_state_dict(file).items()}
            names = stored if is_head else stored.keys() & unexpected
            tensors |= {f"{file.stem}.{key}" if is_head else key: stored[key] for key in names}
    rows = {key: len(tensor) for key, tensor in tensors.items() if key.endswith("weight") and tensor.dim() == 2}
    heads = {key for key in tensors if rows.get(key) in (1, labels) or _HEAD_NAME.search(key.partition(".")[0])}
    heads = {key for key in heads if not key.endswith("bias")}
    weight = min(heads, default="")
    bias, first = weight.removesuffix("weight") + "bias", weight.partition(".")[0]
    parts, shift = {key for key in tensors if key.partition(".")[0] == first}, tensors.get(bias, torch.zeros(labels))
    is_alone = len(heads) == 1 and parts <= {weight, bias} and {_WEIGHT} <= new_head <= {_WEIGHT, _BIAS}
    fits = is_alone and tensors[weight].shape == model.get_parameter(_WEIGHT).shape
    if not fits or (shift.any() and _BIAS not in new_head):
        return heads
    for key in new_head:
        fill(model.get_parameter(key), tensors[weight] if key == _WEIGHT else shift)
    info["missing_keys"] = info["missing_keys"] - new_head
    info["unexpected_keys"] = {key for key in info["unexpected_keys"] if key.removeprefix(prefix) not in parts}
    logger.warning(f"{name}: the head {_WEIGHT} is read from {weight}, the only tensor of its kind.")
    return set()


def _load_in_files(
    name: str, outputs: HeadSpec, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """Load a model with its backbone, except the input embeddings, "offloaded to disk"; None if that is impossible."""
    try:
        config = AutoConfig.from_pretrained(name, **kwargs)
        empty = model_without_weights(config, None, kwargs.get("trust_remote_code", False), outputs)
        offloaded = set(empty.base_model.modules()) - {empty.get_input_embeddings()}
        device_map = {
            path: "disk" if module in offloaded and any(True for _ in module.parameters()) else "cpu"
            for path, module in empty.named_modules()
            if not any(True for _ in module.children())
        }
        settings = kwargs | {"device_map": device_map, "output_loading_info": True}
        with _without_messages(logging.getLogger(dispatch_model.__module__), "were offloaded"):  # they will be read
            model, info = auto_class_of(config, outputs).from_pretrained(name, **settings)
    except (OSError, ValueError):  # converted weights cannot be offloaded; other errors recur in the full load
        return None
    is_lost = any(device_map.get(key.rpartition(".")[0]) == "disk" for key in info["missing_keys"])
    # these weights must stay float32, but reading them from the files would cast them to the model's dtype
    is_mixed = model.dtype != torch.float32 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict)
    return None if is_lost or is_mixed else (model, info)


def remove_offload_hooks(model: PreTrainedModel) -> None:
    """Remove accelerate's offloading hooks from a model whose weights are placed."""
    remove_hook_from_submodules(model)
    for module in model.modules():
        vars(module).pop("forward", None)  # accelerate restores a bound method; a copied model would call the original
    vars(model).pop("hf_device_map", None)
