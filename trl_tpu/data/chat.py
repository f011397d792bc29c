"""Applying a chat template to the messages of a row, with what the row says for it."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError

logger = logging.getLogger(__name__)

# Templates leave out what assistants thought before they answered, so the end of a text says whether it was written.
_END = 20

# Templates ask `strftime_now` for the date, and a macro of that name before them answers in its place.
_FIXED_DATE = "{{% macro strftime_now(format) %}}{}{{% endmacro %}}"
_FORMAT = "\x1f{{ format }}\x1f"

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
        UserError: Content that is no text.
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


def date_written(
    tokenizer: PreTrainedTokenizerBase, chats: Iterable[tuple[Messages, Mapping[str, Any]]]
) -> str | None:
    """Return today's date as a chat template writes it into the first chat, after a warning; None if it does not.

    It does where the chat reads otherwise once the date is replaced by the format that is asked for.

    Args:
        tokenizer: Has the template.
        chats: Messages and their row, of which none is read where the template cannot ask for the date.
    """
    if "strftime_now" not in str(tokenizer.chat_template):
        return None
    for messages, row in islice(chats, 1):
        tools = read_tools(row.get("tools"))
        render = partial(
            apply_template, tokenizer, messages, tools=tools, chat_template_kwargs=row.get("chat_template_kwargs")
        )
        with suppress(Exception):  # a template is a program, which may raise anything; without a date, too
            replaced = render(chat_template=_FIXED_DATE.format(_FORMAT) + tokenizer.get_chat_template(tools=tools))
            if replaced != render():
                date_format = re.search("\x1f(.*?)\x1f", replaced)
                today = datetime.now().strftime(date_format[1] if date_format else "%Y-%m-%d")
                _warn_of_date(today)
                return today
    return None


@cache  # once, for all windows of rows that are scored
def _warn_of_date(today: str) -> None:
    logger.warning(
        f"The chat template writes the day's date into dialogues, {today!r} today, so their rewards are others "
        f"tomorrow. Give the template a date of its own, that of training: put `{_FIXED_DATE.format(today)}` before "
        "it in `tokenizer.chat_template`, in `chat_template_path`'s file, or in a saved model's chat_template.jinja."
    )


def read_tools(tools: Any) -> Any:
    """Return a row's tools: a list, which may be given as JSON text."""
    return json.loads(tools) if isinstance(tools, str) else tools


def template_variables(row_arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a row's variables for the template. None is no value: Arrow fills with it what other rows have."""
    return {key: value for key, value in (row_arguments or {}).items() if value is not None}


def _with(message: dict[str, Any], content: Any) -> dict[str, Any]:
    return message if message.get("content") is None else {**message, "content": content}


def _texts_of(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise UserError(f"the content is {content!r:.200}, which is neither text nor a list of parts of text")
    return texts


def _are_written(messages: Messages, rendered: str) -> bool:
    """Tell whether a rendering holds what the messages say, and not how Python prints it."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    texts = [text for message in messages for text in _texts_of(message)]
    return all(text.strip()[-_END:] in rendered for text in texts) and not any(
        repr(each) in rendered for each in parts
    )
