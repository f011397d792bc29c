"""`setup_chat_format` of TRL up to 0.23."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError

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
    """Add the ChatML template and its two tokens to a model and its tokenizer, in place, as TRL up to 0.23 did.

    Args:
        model: A model with resizable input embeddings.
        tokenizer: The model's tokenizer. `<|im_start|>` becomes the bos token, `<|im_end|>` the eos and pad token.
        format: Must be ``"chatml"``.
        resize_to_multiple_of: Round the number of embedding rows up to a multiple of this. None does not round.

    Raises:
        UserError: ``format`` is not ``"chatml"``.
    """
    if format != "chatml":
        raise UserError(f"`format={format!r}` is not known: use 'chatml', or set `tokenizer.chat_template`.")
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
