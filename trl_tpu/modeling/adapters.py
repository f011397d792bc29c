"""Adapters (PEFT) and quantized base models. Only this module imports peft, and only inside functions."""

import copy
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from ..compat.transformers4 import add_transformers4_names
from ..errors import UserError, explaining
from .head_spec import BASE_CONFIG, HeadSpec, find_file, find_heads, hub_settings, is_peft_model, without_adapters
from .heads import CODE_FILE, load_classifier

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

    from ..trainer.model_config import ModelConfig

logger = logging.getLogger(__name__)
_ATTRIBUTES = "attribute_weights"


def get_peft_config(model_args: "ModelConfig") -> "LoraConfig | None":
    """Make the LoRA configuration that the flags ask for, or None without ``use_peft``."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def read_peft_config(fields: Mapping[str, Any], outputs: HeadSpec) -> "PeftConfig":
    """Make a peft configuration from its fields. Defaults: LoRA, and the task of ``outputs``."""
    from peft import get_peft_config

    task_type = "SEQ_CLS" if outputs.step_separator is None else "TOKEN_CLS"
    return get_peft_config({"peft_type": "LORA", "task_type": task_type, **fields})


def get_quantization_config(model_args: "ModelConfig") -> BitsAndBytesConfig | None:
    """Make the bitsandbytes configuration that the flags ask for; None without ``load_in_4bit`` and ``load_in_8bit``.

    XLA has no kernels for it: see `load_model`.
    """
    if model_args.load_in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=model_args.dtype,  # same dtype as the weights that are not quantized
            bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
            bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if model_args.load_in_8bit else None


def get_kbit_device_map() -> dict[str, int] | None:
    """Return a device map that puts a whole quantized model on this process's GPU; None without a GPU."""
    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None


def reads_base_weights(peft_config: "PeftConfig | None") -> bool:
    """Return whether initializing the adapters reads the base model's weights (PiSSA, OLoRA, LoftQ, DoRA, ...)."""
    starts_plain = getattr(peft_config, "init_lora_weights", True) in (True, False, "gaussian")
    return not starts_plain or getattr(peft_config, "use_dora", False)


def add_adapters(
    model: PreTrainedModel, peft_config: "PeftConfig", added_tokens: Sequence[int] = (), excluded: Sequence[str] = ()
) -> "PeftModel":
    """Freeze a model and add the adapters of `peft_config`. The config itself is not changed.

    Call `prepare_adapters` before training.

    Args:
        model: The model, without adapters.
        peft_config: A peft configuration.
        added_tokens: Ids of tokens that are new to the vocabulary; the adapters train their embeddings.
        excluded: Names of parts of the model that get no adapters.

    Returns:
        The model with its adapters.

    Raises:
        UserError: The model already has adapters.
    """
    from peft import get_peft_model

    if is_peft_model(model):
        raise UserError(
            "The model already has adapters, and `peft_config` (`--use_peft`) would add others. Leave it out to train "
            "the existing adapters, or merge them first (`model.merge_and_unload()`)."
        )
    peft_config = copy.deepcopy(peft_config)
    if added_tokens:
        _train_added_tokens(peft_config, added_tokens, model)
    if excluded and hasattr(peft_config, "exclude_modules"):
        given = peft_config.exclude_modules or []
        given = [given] if isinstance(given, str) else [rf"(.*\.)?{re.escape(name)}" for name in given]
        peft_config.exclude_modules = "|".join([*given, *(rf"{re.escape(name)}(\..*)?" for name in excluded)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # peft reads transformers' former name
        adapted: Any = get_peft_model(model, peft_config)
    for name, parameter in [*adapted.named_parameters()]:
        if "modules_to_save" in name and isinstance(shard := parameter.detach(), DTensor):
            module, _, leaf = name.rpartition(".")  # FSDP2 does not manage peft's copy of a module: unshard it
            whole = nn.Parameter(shard.full_tensor(), parameter.requires_grad)
            adapted.get_submodule(module)._parameters[leaf] = whole
    return adapted


def prepare_adapters(model: "PeftModel", *, gradient_checkpointing: bool) -> None:
    """Prepare a model with adapters for training.

    With gradient checkpointing, the output of the frozen embedding must require gradients: otherwise recomputed
    layers get none. On a quantized base, adapters are cast to bfloat16 as in QLoRA (https://arxiv.org/abs/2305.14314,
    section 3). DoRA's magnitudes keep their dtype, since their updates are smaller than bfloat16 resolves.
    """
    if gradient_checkpointing:
        model.enable_input_require_grads()
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)


def load_adapted_model(folder: str, outputs: HeadSpec, *, is_trainable: bool = False, **kwargs: Any) -> Any:
    """Load a classifier with the adapters saved in `folder`. Their config names the base model.

    Args:
        folder: Folder or Hub id of saved adapters.
        outputs: The outputs of the model; attributes are left to the caller.
        is_trainable: Whether to load for training. The head may then be new.
        **kwargs: Arguments of ``from_pretrained`` of peft and of the base model.

    Raises:
        UserError: A file is broken or names a missing file or model, or a weight is missing.
    """
    import peft

    with explaining(f"{folder} cannot be loaded as a reward model"):
        where = hub_settings(kwargs)
        config = peft.PeftConfig.from_pretrained(folder, **where)
        settings = kwargs | {"revision": config.revision}
        base, info = load_classifier(str(config.base_model_name_or_path), replace(outputs, attributes={}), **settings)
        if find_file(folder, "tokenizer_config.json", **where):
            where["trust_remote_code"] = kwargs.get("trust_remote_code", False)
            tokenizer, embeddings = AutoTokenizer.from_pretrained(folder, **where), base.get_input_embeddings()
            if len(tokenizer) > cast(nn.Embedding, embeddings).num_embeddings:  # training added tokens
                base.resize_token_embeddings(len(tokenizer))
            if tokenizer.pad_token_id is not None:  # as in training, rewards are read at the last other token
                base.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
            adapted: Any = peft.PeftModel.from_pretrained(base, folder, is_trainable=is_trainable, **kwargs)
    trained = () if is_trainable else tuple(adapter_weights(adapted))
    random = sorted(key for key in info["missing_keys"] if not any(name.endswith(f".{key}") for name in trained))
    if random and not is_trainable:
        raise UserError(
            f"{folder}: neither the adapters nor their base model have {', '.join(random)}, so rewards would be "
            "random. Train adapters with `modules_to_save` or `task_type='SEQ_CLS'`."
        )
    return adapted


def read_attribute_weights(model: Any) -> dict[str, float]:
    """Return the weights, by name, that `write_attribute_weights` wrote into the adapters' config; empty if none."""
    mappings = (config.auto_mapping or {} for config in model.peft_config.values())
    return dict(next((mapping[_ATTRIBUTES] for mapping in mappings if _ATTRIBUTES in mapping), ()))


def write_attribute_weights(model: Any, attributes: Mapping[str, float]) -> None:
    """Write attribute weights into the config of a model's adapters; peft saves and loads them with the adapters.

    peft drops unknown keys. Its `auto_mapping` can hold the weights: it is a dict, and unused by adapters with a
    `task_type`.
    """
    for config in model.peft_config.values() if attributes else ():
        config.auto_mapping = {_ATTRIBUTES: [*map(list, attributes.items())]}


def _train_added_tokens(peft_config: Any, added_tokens: Sequence[int], model: PreTrainedModel) -> None:
    """Let the adapters also train the embeddings of ``added_tokens`` (changes `peft_config`)."""
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding).rpartition(".")[2]
    if name in (getattr(peft_config, "modules_to_save", None) or []):
        return  # all embeddings are trained already
    trained = peft_config.trainable_token_indices or {}
    by_module = dict(trained) if isinstance(trained, dict) else {name: trained}
    by_module[name] = list(dict.fromkeys([*by_module.get(name, []), *added_tokens]))
    peft_config.trainable_token_indices = by_module


def warn_if_head_is_frozen(model: nn.Module) -> None:
    """Warn when adapters leave the score head frozen, or train on top of a head that they do not save.

    A new head is random, and a frozen head stays random. An adapter saves neither a frozen head nor the frozen weight
    under an adapted head, so the reloaded model would compute rewards by another random head.
    """
    for name, head in find_heads(without_adapters(model)).items():
        parameters = dict(head.named_parameters())
        trained = [key for key, parameter in parameters.items() if parameter.requires_grad]
        is_saved = any("modules_to_save" in key for key in trained)
        if parameters and not is_saved and (not trained or "base_layer.weight" in parameters):
            logger.warning(
                f"The weight of the score head `{name}` is frozen, and the adapter does not save it: a new head stays "
                "random, and reloading creates another random head. Unless the head was trained before, add "
                f"modules_to_save=['{name}'] or task_type='SEQ_CLS' to the peft_config."
            )


def save_adapter_config(model: Any, processing_class: Any, folder: str) -> None:
    """Write the configs of a model's adapters and its tokenizer, without weights."""
    for name, config in model.peft_config.items():
        config.save_pretrained(Path(folder, "" if name == "default" else name))
    processing_class.save_pretrained(folder)


def complete_config(model: nn.Module, folder: str | Path) -> None:
    """Add configs for other programs to the folder of a saved model or of saved adapters.

    For adapters, write the config of the whole reward model; pass it to ``from_pretrained`` as ``config``. If
    transformers has no class for it, also write the class.
    """
    if is_peft_model(model):
        base = without_adapters(model)
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__.removeprefix("FSDP")]  # FSDP2 renames the classes of its models
        Path(folder, BASE_CONFIG).write_text(config.to_json_string(), encoding="utf-8")
        if hasattr(base, "code_of_head"):  # the base model's folder has no such file
            Path(folder, CODE_FILE).write_text(base.code_of_head, encoding="utf-8")
    add_transformers4_names(folder)


def adapter_names(model: nn.Module, state: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names in a state dict that a checkpoint stores: adapters, prompts and PEFT's `modules_to_save`."""
    adapters: Any = getattr(model, "peft_config", {})
    saved = {name for adapter in adapters for name in names_in_file(model, state, adapter).values()}
    # peft saves the output of a prompt encoder, but resuming needs its weights
    return saved | {name for name in state if name.startswith("prompt_encoder.")}


def names_in_file(model: nn.Module, state: Mapping[str, torch.Tensor], adapter: str) -> dict[str, str]:
    """Map tensor names in the file that ``save_pretrained`` writes for an adapter to names in a state dict."""
    order = list(state)
    marks = {name: torch.tensor(index) for index, name in enumerate(order)}  # peft may copy tensors, so mark by value
    saved = adapter_weights(model, state_dict=marks, adapter_name=adapter)
    return {name: order[int(mark)] for name, mark in saved.items() if mark.dim() == 0}


def adapter_weights(model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that ``save_pretrained`` writes for a model with adapters, by their names in the file.

    Args:
        model: The model.
        **kwargs: Arguments of peft's `get_peft_model_state_dict`.
    """
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, **kwargs)


def empty_adapters(model: PreTrainedModel, folder: str, dtype: torch.dtype) -> "PeftModel":
    """Make uninitialized adapters on the CPU, as ``adapter_config.json`` in `folder` describes them.

    Args:
        model: The base model. It stays on its device, possibly the meta device.
        folder: A checkpoint.
        dtype: Data type of the adapters.
    """
    from peft import PeftConfig, get_peft_model

    peft_config = PeftConfig.from_pretrained(folder)
    peft_config.base_model_name_or_path = model.name_or_path
    adapted: Any = get_peft_model(model, peft_config, low_cpu_mem_usage=True)
    state = adapted.state_dict(keep_vars=True)
    empty = {name: torch.empty_like(state[name], dtype=dtype, device="cpu") for name in adapter_names(adapted, state)}
    adapted.load_state_dict(empty, strict=False, assign=True)
    return adapted
