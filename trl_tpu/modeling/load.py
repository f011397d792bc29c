"""Load a model and its tokenizer, set special tokens, and prepare the model for training."""

import copy
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import find_adapter_config_file

from .. import runtime
from ..config.reward_config import RewardConfig
from ..errors import UserError, explaining
from ..parallel.mesh import MeshShape
from ..parallel.shard import parameter_pattern, trial_mode
from .adapters import load_adapted_model
from .head_spec import ONE_REWARD, HeadSpec, hub_settings
from .heads import load_classifier

logger = logging.getLogger(__name__)

_NEW_PAD_TOKEN = "<|pad|>"
# padding tokens of Llama 3.1, Qwen 2 and 3, BERT, ...; then reserved tokens of Llama 3, Gemma, Phi 3, Mistral, T5
_PADDING_NAMES = tuple(
    re.compile(rf"[<\[]\|?{name}\|?[>\]]", re.IGNORECASE)
    for name in (r"(\w+_)?pad(_\w+)?", r"(reserved|unused|placeholder|control|extra_id)\w*")
)


def set_special_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: RewardConfig
) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Set the eos token, the chat template and the pad token, and write both tokens to the model's config.

    transformers reads a reward at the rightmost token that is not the pad token, so the config must have the pad
    token. The first of these is used: ``pad_token`` of ``args``, the tokenizer's pad token, the eos token. With
    ``own_pad_token``, the eos token is replaced: by a token that texts do not contain, or by a new token. A new token
    needs an unused row of the embedding table.

    Args:
        model: A model with input embeddings. Embeddings of tokens for a cloned chat template are added to it.
        tokenizer: The model's tokenizer. It is not changed.
        args: Settings. ``chat_template_path`` is a ``.jinja`` or ``.j2`` file, or a tokenizer to clone the template
            of: see `clone_chat_template`.

    Returns:
        The tokenizer, copied if it had to change, and the ids of the tokens that the template added.

    Raises:
        FileNotFoundError: The template file does not exist.
        UserError: A token is not in the vocabulary, the pad token is missing or has no embedding, or a tokenizer
            cannot be loaded.
    """
    config, path, added = model.config.get_text_config(), args.chat_template_path, list[int]()
    if args.eos_token is not None:
        tokenizer = _with_token(tokenizer, "eos_token", args.eos_token)
        config.eos_token_id = tokenizer.eos_token_id
    if path is not None:
        tokenizer = copy.deepcopy(tokenizer)
        if path.endswith((".jinja", ".j2")) and not Path(path).is_dir():
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        else:
            _, _, added = clone_chat_template(model, tokenizer, path)
    token = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
    if args.own_pad_token and token is not None and token == tokenizer.eos_token:
        token = _reserved_token(tokenizer)
        if token is None:
            tokenizer, token = copy.deepcopy(tokenizer), _NEW_PAD_TOKEN
            tokenizer.add_special_tokens({"pad_token": token})
    tokenizer = _with_token(tokenizer, "pad_token", token)
    embeddings: Any = model.get_input_embeddings()
    if tokenizer.pad_token_id >= embeddings.weight.shape[0]:
        raise UserError(
            f"The pad token {token!r} has the id {tokenizer.pad_token_id}, but the embedding table has "
            f"{embeddings.weight.shape[0]} rows. Call `model.resize_token_embeddings(len(tokenizer))`, or set "
            "`pad_token` to a token that texts do not contain."
        )
    config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, added


def _reserved_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a token that texts do not contain; None if there is none.

    Tokens named for padding come first, then reserved tokens, then the last special token that the chat template does
    not contain.
    """
    in_use = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    free = [token for token, _ in by_id if token not in in_use]
    named = (token for name in _PADDING_NAMES for token in free if name.fullmatch(token))
    special = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    unnamed = (token for token in special[::-1] if token in free and token not in str(tokenizer.chat_template))
    return next(named, next(unnamed, None))


def _with_token(processing_class: PreTrainedTokenizerBase, kind: str, token: str | None) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose ``kind`` ("eos_token", "pad_token") is ``token``: a copy if it had another token."""
    if token not in processing_class.get_vocab():
        raise UserError(
            f"The specified `{kind}` ({token!r}) is not found in the vocabulary of the given `processing_class`. "
            "Choose another token, or add it to the vocabulary and resize the embeddings."
        )
    if getattr(processing_class, kind) != token:
        processing_class = copy.deepcopy(processing_class)
        setattr(processing_class, kind, token)
    return processing_class


def clone_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Copy the chat template of another tokenizer to a model and its tokenizer, with the template's tokens.

    As in TRL, both are changed in place. The tokenizer gets the source's template, eos token and missing added tokens.
    The embeddings get one row per new token. If the number of rows is rounded up, tokens ``<extra_id_i>`` are added
    for the extra rows.

    Args:
        model: A model with resizable input embeddings.
        tokenizer: The model's tokenizer.
        source_tokenizer_path: Hub id or folder of the tokenizer to copy from.
        resize_to_multiple_of: Round the number of embedding rows up to a multiple of this. None does not round.

    Returns:
        The model, the tokenizer, and the ids of the added tokens.
    """
    source = load_tokenizer(source_tokenizer_path)
    tokenizer.chat_template = source.get_chat_template()
    vocabulary = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if token.content not in vocabulary]
    tokenizer.add_tokens(added)
    tokenizer.eos_token = source.eos_token
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id

    # `tokenizer.vocab_size` leaves out added tokens for some tokenizers; the vocabulary itself does not.
    size = len(tokenizer.get_vocab())
    has_weights = model.device.type != "meta"  # `trl-tpu plan` has models on the meta device
    model.resize_token_embeddings(size, pad_to_multiple_of=resize_to_multiple_of, mean_resizing=has_weights)
    embeddings: Any = model.get_input_embeddings()
    index = 0
    while len(tokenizer.get_vocab()) < embeddings.num_embeddings:
        filler = AddedToken(f"<extra_id_{index}>")
        if tokenizer.add_tokens(filler):
            added.append(filler)
        index += 1
    vocabulary = tokenizer.get_vocab()
    return model, tokenizer, [vocabulary[token.content] for token in added]


def load_model(
    name: str,
    outputs: HeadSpec = ONE_REWARD,
    *,
    in_files: bool = False,
    mesh: MeshShape | None = None,
    is_trainable: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a checkpoint as a reward model with ``outputs``, or load saved adapters with their model.

    A causal language model's checkpoint has no reward head. The new head is random, so set the seed first. The model
    stays on the CPU; the trainer places it (TRL defaults to ``device_map="auto"`` on accelerators).

    Args:
        name: A Hub id or folder.
        outputs: The head specification of the model.
        in_files, mesh: See `load_classifier`.
        is_trainable: Whether to load for training. Otherwise the head must be in the checkpoint.
        **kwargs: Arguments of ``from_pretrained``. ``dtype`` defaults to float32.

    Raises:
        UserError: ``quantization_config`` is set on XLA, or the name or folder does not hold a complete model.
    """
    if "torch_dtype" in kwargs:  # the name of `dtype` before transformers 4.56; TRL ignores it and loads float32
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    kwargs.setdefault("dtype", torch.float32)
    if kwargs.get("num_labels", num_labels := len(outputs.weights)) != num_labels:
        logger.warning(f"`num_labels={kwargs['num_labels']}` is ignored: this reward model has {num_labels}.")
    kwargs["num_labels"] = num_labels
    runtime.current().fit_loading_arguments(kwargs)
    with explaining(f"{name} cannot be loaded as a reward model"):
        adapters = find_adapter_config_file(name, **hub_settings(kwargs))
    if adapters is not None:
        if kwargs.get("device_map") == "meta":  # peft reads weights: all processes load
            kwargs.pop("device_map")
        return load_adapted_model(name, outputs, is_trainable=is_trainable, **kwargs)
    model, info = load_classifier(name, outputs, in_files=in_files, mesh=mesh, **kwargs)
    if not is_trainable and (lost := sorted(info["missing_keys"])):
        raise UserError(f"{name} lacks {lost}: rewards would be random. Score with the folder that training saved.")
    return model


def get_config_model_id(config: Any) -> str:
    """Return the name or folder that a model was loaded from; an empty string if it was not loaded."""
    return getattr(config, "_name_or_path", "")


def load_processing_class(
    model: PreTrainedModel, processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer or the given processor's, or load the tokenizer of the model's checkpoint.

    Args:
        model: Its config names its checkpoint.
        processing_class: A tokenizer or processor; None loads the checkpoint's tokenizer.
        **kwargs: Arguments of ``from_pretrained``.

    Raises:
        UserError: None is given, and the model was not loaded from a checkpoint with a tokenizer.
    """
    if processing_class is not None:
        return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    if not (name := get_config_model_id(model.config)):
        raise UserError("The model was not loaded from a checkpoint: pass its tokenizer as `processing_class`.")
    return load_tokenizer(name, **kwargs)


def load_tokenizer(name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer by `AutoTokenizer.from_pretrained`.

    Raises:
        UserError: The tokenizer does not exist, or it cannot be loaded.
    """
    with explaining(f"{name} cannot be loaded as a tokenizer"):
        return AutoTokenizer.from_pretrained(name, **kwargs)


# ---- before training


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set all dropout probabilities to 0, in place: of `nn.Dropout`, and of layers that call dropout as a function."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def freeze(model: nn.Module, pattern: str | None) -> None:
    """Freeze the parameters whose names contain a match of ``pattern``; None freezes none.

    Raises:
        UserError: The pattern matches no trainable parameter.
    """
    if pattern is None:
        return
    named = model.named_parameters(remove_duplicate=False)  # a tied parameter has several names
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    frozen = [parameter for name, parameter in trainable if re.search(pattern, name)]
    if not frozen:
        names = ", ".join(dict.fromkeys(parameter_pattern(name) for name, _ in trainable))
        raise UserError(f"frozen_parameters={pattern!r} matches no trainable parameter. Choose from {names}.")
    for parameter in frozen:
        parameter.requires_grad_(False)


def unread_towers(model: PreTrainedModel) -> list[str]:
    """Return the names of the parts of a multimodal model that text does not reach, such as its vision tower.

    A part is a child of the backbone. Text does not reach it if a forward of a few tokens calls none of its modules.
    """
    if model.config.get_text_config() is model.config:
        return []
    special = {value for name, value in model.config.to_dict().items() if name.endswith(("_token_id", "_token_index"))}
    embeddings: Any = model.get_input_embeddings()  # other weights may be in files
    ids = torch.tensor([[token for token in range(32) if token not in special][:4]], device=embeddings.weight.device)
    called = set[nn.Module]()
    with trial_mode(model), register_module_forward_pre_hook(lambda module, _: called.add(module)):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    unread = {part for part in model.base_model.children() if called.isdisjoint(part.modules())}
    return [name for name, part in model.named_modules() if part in unread and any(True for _ in part.parameters())]


def freeze_towers(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the parts of a model that text does not reach, and report them."""
    for name in names:
        part = model.get_submodule(name).requires_grad_(False)
        size = sum(parameter.numel() for parameter in part.parameters()) / 1e6
        logger.warning(
            f"{name}: {size:,.1f} million parameters are not used by text, and frozen (see train_unread_towers)."
        )
