"""Applying a chat template to the messages of a row, with what the row says for it."""

import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError, UserTypeError

# All other arguments of transformers' method say what is done with the text, or which template writes it.
_FOR_THE_TEMPLATE = {"documents", "add_generation_prompt", "kwargs"}
_FOR_THE_TOKENIZER = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - _FOR_THE_TEMPLATE

# A template may write so many characters, and so many for each of the row's: tokens take tens of times their memory.
_ALWAYS_WRITTEN, _WRITTEN_FOR_EACH = 1_000_000, 100

_MARK = "ThisIsWritten"
_PART = {"type": "text", "text": _MARK}
_TRIED: dict[str, Any] = {"str": _MARK, "list": [_PART], "dict": _PART}
_USER, _ASSISTANT = ({"role": role, "content": "x"} for role in ("user", "assistant"))
# templates differ in what must stand before or after a message
_SURROUNDINGS: list[tuple[list[Any], list[Any]]] = [
    ([], []),
    ([_USER], []),
    ([], [_USER]),
    ([_USER, _ASSISTANT], []),
]


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    /,
    *,
    tools: Any = None,
    chat_template_kwargs: Any = None,
    **settings: Any,
) -> Any:
    """Apply a tokenizer's chat template to messages, as its method ``apply_chat_template`` does.

    Content that is a list of text parts is joined to one text where the template reads text only, and a text becomes
    one part where it reads parts only: others would be written as Python prints a list, or left out.

    Args:
        tokenizer: has the template.
        messages: one dialogue.
        tools: a list of functions or of their JSON schemas, or that as JSON text.
        chat_template_kwargs: a row's variables for the template. None is no value: Arrow fills with it what other
            rows have.
        **settings: for the tokenizer's method; they win over the row's.

    Raises:
        UserError: an argument of the row that is not for the template, content that neither the template nor anybody
            can read as text, or a text that is far longer than what the row says.
        UserTypeError: a row's arguments are no mapping.
    """
    tools = json.loads(tools) if isinstance(tools, str) else tools
    arguments = {**_template_variables(chat_template_kwargs), **settings}
    if arguments.get("chat_template") or getattr(tokenizer, "chat_template", None):  # Mistral's own has none to ask
        template = tokenizer.get_chat_template(arguments.get("chat_template"), tools)
        messages = [_readable(message, tokenizer, template) for message in messages]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, **arguments)
    if isinstance(rendered, str) and len(rendered) > _ALWAYS_WRITTEN:
        said = len(repr((messages, tools, arguments)))
        if len(rendered) > _ALWAYS_WRITTEN + _WRITTEN_FOR_EACH * said:
            raise UserError(f"the template writes {len(rendered)} characters for {said} of the row")
    return rendered


def renders_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's tokens of messages are those of the text that its template writes."""
    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a small dialogue, where the tokenizer has a template; what the template makes of it does not matter.

    Raises:
        MemoryError, TimeoutError: for `checks.rendering`.
    """
    if getattr(tokenizer, "chat_template", None):
        _writes_mark(tokenizer, None, [_USER, _ASSISTANT])


def _template_variables(row_arguments: Any) -> dict[str, Any]:
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


def _readable(message: dict[str, Any], tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, Any]:
    """Return the message as the template can read it."""
    content, role = message.get("content"), message.get("role", "")
    kind = type(content).__name__
    if kind not in _TRIED or content == "" or _reads(tokenizer, template, role, kind):
        return message
    if not isinstance(content, str):
        parts = content if isinstance(content, list) else [content]
        content = "".join([_text_of(part) for part in parts])
    elif _reads(tokenizer, template, role, "list"):
        content = [{"type": "text", "text": content}]
    return {**message, "content": content}


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") in (None, "text") else None
    if not isinstance(text, str):
        raise UserError(
            f"the template reads text, but the content holds {part!r:.200}, where only text and parts "
            "{'type': 'text', 'text': ...} can be read"
        )
    return text


@lru_cache(maxsize=32)
def _reads(tokenizer: PreTrainedTokenizerBase, template: str, role: str, kind: str) -> bool:
    """Try whether the template writes the words of content of a type: a text, a list of parts, or a part alone."""
    tried = [{"role": role, "content": _TRIED[kind]}]
    return any(_writes_mark(tokenizer, template, before + tried + after) for before, after in _SURROUNDINGS)


def _writes_mark(tokenizer: PreTrainedTokenizerBase, template: str | None, messages: list[dict[str, Any]]) -> bool:
    try:
        text: Any = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except (MemoryError, TimeoutError):  # for `checks.rendering`
        raise
    except Exception:  # a template is a program, which may raise anything
        return False
    return _MARK in text and repr(_MARK) not in text  # else this is how Python prints a part
