"""Making a model and its tokenizer agree on their special tokens.

The functions that need another tokenizer than the user's return a changed copy and leave the user's as it was (TRL
writes into it). The model's config is written to, as in TRL: the saved model must carry its pad and eos tokens.
"""

import copy
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError

logger = logging.getLogger(__name__)

_NEW_PAD_TOKEN = "<|pad|>"
# of Llama 3.1, Qwen 2 and 3, BERT, ...; then of Llama 3, Gemma, Phi 3, Mistral, T5
_RESERVED = tuple(
    re.compile(rf"[<\[]\|?{name}\|?[>\]]", re.IGNORECASE)
    for name in (r"(\w+_)?pad(_\w+)?", r"(reserved|unused|placeholder|control|extra_id)\w*")
)


def set_eos_token(
    model: PreTrainedModel, processing_class: PreTrainedTokenizerBase, eos_token: str | None
) -> PreTrainedTokenizerBase:
    """Make ``eos_token`` the end-of-sequence token of tokenizer and model config; None changes nothing.

    Returns:
        The tokenizer, a copy where it had to change.

    Raises:
        UserError: The token is not in the vocabulary.
    """
    if eos_token is None:
        return processing_class
    processing_class = _with_token(processing_class, "eos_token", eos_token)
    model.config.get_text_config().eos_token_id = processing_class.eos_token_id
    return processing_class


def set_pad_token(
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase,
    pad_token: str | None = None,
    *,
    own: bool = False,
) -> PreTrainedTokenizerBase:
    """Settle the pad token (``pad_token``, else the tokenizer's, else its eos token) and write it to the model config.

    transformers reads a reward at the rightmost token that is not the pad token, so the config must know it.

    Args:
        model: Has input embeddings.
        processing_class: The tokenizer.
        pad_token: A token of its vocabulary.
        own: Whether to pad with another token where that would be the eos token: one that texts do not contain, else a
            new one, for which the embedding table has to have an unused row.

    Returns:
        The tokenizer, a copy where it had to change.

    Raises:
        UserError: The token is not in the vocabulary, there is none, or the model has no embedding for it.
    """
    token = pad_token or processing_class.pad_token or processing_class.eos_token
    embeddings: Any = model.get_input_embeddings()
    if own and token is not None and token == processing_class.eos_token:
        token = _reserved_token(processing_class)
        if token is None:
            processing_class, token = copy.deepcopy(processing_class), _NEW_PAD_TOKEN
            processing_class.add_special_tokens({"pad_token": token})
    if token is None:
        raise UserError("The tokenizer has neither a pad nor an eos token. Set `tokenizer.pad_token`.")
    processing_class = _with_token(processing_class, "pad_token", token)
    if processing_class.pad_token_id >= embeddings.weight.shape[0]:
        raise UserError(
            f"The pad token {token!r} has the id {processing_class.pad_token_id}, but the embedding table has "
            f"{embeddings.weight.shape[0]} rows. Call `model.resize_token_embeddings(len(tokenizer))`, or set "
            "`pad_token` to a token that texts do not contain."
        )
    model.config.get_text_config().pad_token_id = processing_class.pad_token_id
    return processing_class


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
