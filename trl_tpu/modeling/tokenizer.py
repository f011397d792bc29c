"""Prepares a tokenizer: its special tokens and its chat template."""

import copy
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from ..config.reward_config import RewardConfig
from ..errors import UserError
from .load import load_tokenizer

logger = logging.getLogger(__name__)

_NEW_PAD_TOKEN = "<|pad|>"
# of Llama 3.1, Qwen 2 and 3, BERT, ...; then of Llama 3, Gemma, Phi 3, Mistral, T5
_RESERVED = tuple(
    re.compile(rf"[<\[]\|?{name}\|?[>\]]", re.IGNORECASE)
    for name in (r"(\w+_)?pad(_\w+)?", r"(reserved|unused|placeholder|control|extra_id)\w*")
)


def settle_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: RewardConfig
) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Settle the eos token, the chat template and the pad token, and write both tokens to the model's config.

    transformers reads a reward at the rightmost token that is not the pad token, so the config must know it. The pad
    token is the one of ``args``, else the tokenizer's, else its eos token, or with ``own_pad_token`` another: one that
    texts do not contain, else a new one, for which the embedding table has to have an unused row.

    Args:
        model: Has input embeddings. Those of tokens that another tokenizer's template needs are added to it.
        tokenizer: The model's, which stays as it is.
        args: ``chat_template_path`` is a ``.jinja`` or ``.j2`` file, or see `clone_chat_template`.

    Returns:
        The tokenizer, a copy where it had to change, and the ids of the tokens that the template added.

    Raises:
        FileNotFoundError: There is no such template file.
        UserError: A token is not in the vocabulary, there is no pad token, the model has no embedding for it, or a
            tokenizer cannot be loaded.
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
    if token is None:
        raise UserError("The tokenizer has neither a pad nor an eos token. Set `tokenizer.pad_token`.")
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
    """Return a token that texts do not contain: by its name one to pad with or a reserved one, else a special one.

    That is the last of those that were added and that the chat template does not name.
    """
    in_use = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    free = [token for token, _ in by_id if token not in in_use]
    named = (token for name in _RESERVED for token in free if name.fullmatch(token))
    special = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    unnamed = (token for token in special[::-1] if token in free and token not in str(tokenizer.chat_template))
    return next(named, next(unnamed, None))


def warn_of_unscored_eos(tokenizer: PreTrainedTokenizerBase, dialogues: Iterable[Sequence[int]] | None) -> None:
    """Warn where padding is the eos token and some of ``dialogues`` (None: unknown ones) end in it."""
    eos = tokenizer.eos_token_id
    if tokenizer.pad_token_id == eos and (dialogues is None or any(list(ids[-1:]) == [eos] for ids in dialogues)):
        logger.warning(
            f"The pad token is the eos token ({tokenizer.eos_token!r}), and dialogues end in it: training scores the "
            "token before it, as TRL and transformers do, while servers that score the very last token (vLLM, SGLang) "
            "give other rewards. Set own_pad_token=True to pad with another token."
        )


def _with_token(processing_class: PreTrainedTokenizerBase, kind: str, token: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer with ``token`` as its token of a ``kind``, a copy where it had another."""
    if token not in processing_class.get_vocab():
        raise UserError(
            f"The specified `{kind}` ({token!r}) is not found in the vocabulary of the given `processing_class` "
            f"({type(processing_class).__name__}). Choose a token of it, or add this one and resize the embeddings."
        )
    if getattr(processing_class, kind) != token:
        processing_class = copy.deepcopy(processing_class)
        setattr(processing_class, kind, token)
    return processing_class


# OpenAI's ChatML, as TRL up to 0.23 rendered it
_START, _END = "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{% for message in messages %}"
    f"{{{{'{_START}' + message['role'] + '\n' + message['content'] + '{_END}' + '\n'}}}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    f"{{{{ '{_START}assistant\n' }}}}"
    "{% endif %}"
)


def setup_chat_format(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Give a model and its tokenizer, in place, the ChatML template and its two tokens, as TRL up to 0.23 did.

    Args:
        model: has input embeddings that can be resized.
        tokenizer: the model's; `<|im_start|>` becomes its bos token, `<|im_end|>` its eos and pad token.
        format: only ``"chatml"``.
        resize_to_multiple_of: what the number of embedding rows is rounded up to.

    Raises:
        UserError: another format.
    """
    if format != "chatml":
        raise UserError(f"`format={format!r}` is not known: it is 'chatml', or set `tokenizer.chat_template`.")
    tokenizer.add_special_tokens(
        {"bos_token": _START, "eos_token": _END, "pad_token": _END, "additional_special_tokens": [_START, _END]}
    )
    tokenizer.chat_template = _CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def clone_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Give a model and its tokenizer the chat template of another tokenizer, with the tokens that it needs.

    As in TRL, both are changed in place: the tokenizer gets the source's template, eos token and those of its added
    tokens that it lacks; the embeddings get a row for each, and are rounded up to a multiple of
    ``resize_to_multiple_of`` rows (None: not rounded), with as many tokens ``<extra_id_i>`` added to fill them.

    Args:
        model: has input embeddings that can be resized.
        tokenizer: the model's.
        source_tokenizer_path: hub id or folder of the tokenizer whose template is taken.
        resize_to_multiple_of: what the number of embedding rows is rounded up to.

    Returns:
        The model, the tokenizer, and the ids of the tokens that were added.
    """
    source = load_tokenizer(source_tokenizer_path)
    tokenizer.chat_template = source.get_chat_template()
    known = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if token.content not in known]
    tokenizer.add_tokens(added)
    tokenizer.eos_token = source.eos_token
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id

    # `tokenizer.vocab_size` leaves out added tokens for some tokenizers; the vocabulary itself does not.
    has_weights = model.device.type != "meta"  # as a model that is planned has not
    model.resize_token_embeddings(
        len(tokenizer.get_vocab()), pad_to_multiple_of=resize_to_multiple_of, mean_resizing=has_weights
    )
    embeddings: Any = model.get_input_embeddings()
    index = 0
    while len(tokenizer.get_vocab()) < embeddings.num_embeddings:
        filler = AddedToken(f"<extra_id_{index}>")
        if tokenizer.add_tokens(filler):
            added.append(filler)
        index += 1
    vocabulary = tokenizer.get_vocab()
    return model, tokenizer, [vocabulary[token.content] for token in added]
