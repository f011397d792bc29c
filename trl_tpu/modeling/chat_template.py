"""Giving a model and its tokenizer a chat template that they did not come with."""

import copy
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from .load import load_tokenizer

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


def set_chat_template(
    model: PreTrainedModel, processing_class: PreTrainedTokenizerBase, path: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Take the chat template of a ``.jinja`` or ``.j2`` file, or of another tokenizer (see `clone_chat_template`).

    Returns:
        The model, a changed copy of the tokenizer (the tokenizer itself where ``path`` is None), and the ids of the
        tokens that were added.

    Raises:
        FileNotFoundError: There is no such template file.
        UserError: A tokenizer that cannot be loaded.
    """
    if path is None:
        return model, processing_class, []
    processing_class = copy.deepcopy(processing_class)
    if not path.endswith((".jinja", ".j2")) or Path(path).is_dir():
        return clone_chat_template(model, processing_class, path)
    processing_class.chat_template = Path(path).read_text(encoding="utf-8")
    return model, processing_class, []


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
