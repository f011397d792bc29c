"""Applying a chat template to the messages of a row, with what the row says for it."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError, UserTypeError

# All other arguments of transformers' method say what is done with the text, or which template writes it.
_FOR_THE_TEMPLATE = {"documents", "add_generation_prompt", "kwargs"}
_FOR_THE_TOKENIZER = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - _FOR_THE_TEMPLATE

# Templates leave out what assistants thought before they answered, so the end of a text says whether it was written.
_END = 20

Messages = list[dict[str, Any]]


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, /, *, tools: Any = None, **settings: Any
) -> str:
    """Render messages by a tokenizer's chat template, as its method ``apply_chat_template`` does.

    Content that the template does not write as it is, is given to it in its other form: a list of text parts as one
    text, a text as one part. Templates that read the other form print it as Python does, or leave it out.

    Args:
        tokenizer: Has the template.
        messages: One dialogue.
        tools: A list of functions or of their JSON schemas, or that as JSON text.
        **settings: For the tokenizer's method; ``chat_template_kwargs`` is as in `template_variables`.

    Raises:
        UserError: An argument of the row that is not for the template, or content that is no text.
        UserTypeError: A row's arguments are no mapping.
    """
    arguments = {**template_variables(settings.pop("chat_template_kwargs", None)), **settings}
    arguments |= {"tools": read_tools(tools), "tokenize": False}
    render: Callable[[Messages], Any] = partial(tokenizer.apply_chat_template, **arguments)
    as_text = [_with(each, "".join(_texts_of(each))) for each in messages]
    as_parts = [_with(each, [{"type": "text", "text": text} for text in _texts_of(each)]) for each in messages]
    for form in (messages, as_text, as_parts):
        try:
            rendered = render(form)
        except TimeoutError:  # of `checks.rendering`
            raise
        except Exception:  # a template is a program, which may raise anything
            continue
        if _are_written(form, rendered):
            return rendered
    return render(messages)


def read_tools(tools: Any) -> Any:
    """Return a row's tools: a list, which may be given as JSON text."""
    return json.loads(tools) if isinstance(tools, str) else tools


def template_variables(row_arguments: Any) -> dict[str, Any]:
    """Return a row's variables for the template. None is no value: Arrow fills with it what other rows have."""
    if row_arguments is None:
        return {}
    if not isinstance(row_arguments, Mapping):
        raise UserTypeError(f"`chat_template_kwargs` must be a mapping, not {type(row_arguments).__name__}")
    variables = {key: value for key, value in row_arguments.items() if value is not None}
    for key in variables:
        if key in _FOR_THE_TOKENIZER:
            raise UserError(
                f"`chat_template_kwargs` has the key {key!r}, which is no variable of a template: it would change how "
                "this row alone is read or tokenized"
            )
    return variables


def _with(message: dict[str, Any], content: Any) -> dict[str, Any]:
    return message if message.get("content") is None else {**message, "content": content}


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [] if content is None else [content]


def _texts_of(message: dict[str, Any]) -> list[str]:
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in _parts(message)]
    for part, text in zip(_parts(message), texts, strict=True):
        if not isinstance(text, str) or (part is text and isinstance(message["content"], list)):
            raise UserError(
                f"the content holds {part!r:.200}, where only text and parts {{'type': 'text', 'text': ...}} can be "
                "read"
            )
    return texts


def _are_written(messages: Messages, rendered: str) -> bool:
    """Tell whether a rendering holds what the messages say, and not how Python prints it."""
    return all(
        text.strip()[-_END:] in rendered and (part is text or repr(part) not in rendered)
        for message in messages
        for part, text in zip(_parts(message), _texts_of(message), strict=True)
    )
