"""Conversion of preference data: text or messages, with or without an explicit prompt, to one form."""

import ast
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from ..errors import UserError, UserTypeError

ListOrMapping = TypeVar("ListOrMapping", list, Mapping)


def remove_none_values(example: ListOrMapping) -> ListOrMapping:
    """Drop mapping entries that are None, at any depth: Arrow adds them for absent struct fields.

    Can be used as ``dataset.with_transform(remove_none_values)``; its batches are mappings of lists.

    Raises:
        UserTypeError: The input is neither a list nor a mapping.
    """

    if not isinstance(example, list | Mapping):
        raise UserTypeError(f"Input must be a list or a dictionary, got {type(example).__name__}.")
    return _without_none(example)


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


# Templates may leave out an assistant's thoughts, at the beginning of a text. So search only for the end of the text.
_SEARCHED_CHARACTERS = 20

Messages = list[dict[str, Any]]


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, /, *, tools: Any = None, **settings: Any
) -> str:
    """Render messages with the tokenizer's chat template, as its method ``apply_chat_template`` does.

    Content is a text or a list of text parts. Templates that support only one of these forms may leave out content in
    another form, or print its Python repr. In that case the content is converted and rendered again.

    Args:
        tokenizer: The tokenizer with the template.
        messages: One conversation.
        tools: A list of functions or JSON schemas, or such a list as JSON text.
        **settings: Arguments of the tokenizer's method; for ``chat_template_kwargs`` see `template_arguments`.

    Raises:
        UserError: The content of a message is not text.
    """
    row_arguments = template_arguments(tools, settings.pop("chat_template_kwargs", None))
    arguments = row_arguments | settings | {"tokenize": False}
    render: Callable[[Messages], Any] = partial(tokenizer.apply_chat_template, **arguments)
    as_text = [_with_content(turn, "".join(_texts_of(turn))) for turn in messages]
    as_parts = [_with_content(turn, [{"type": "text", "text": text} for text in _texts_of(turn)]) for turn in messages]
    for form in (messages, as_text, as_parts):
        try:
            rendered = render(form)
        except TimeoutError:  # the time limit of `checks.rendering`
            raise
        except Exception:  # templates are programs and may raise anything
            continue
        if _are_written(form, rendered):
            return rendered
    return render(messages)


def template_arguments(tools: Any, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a row's variables for the template, and its tools, parsed if they are JSON text; variables win.

    Variables that are None are left out: Arrow adds them if other rows have these variables.
    """
    present = {key: value for key, value in (variables or {}).items() if value is not None}
    return {"tools": json.loads(tools) if isinstance(tools, str) else tools} | present


def _with_content(message: dict[str, Any], content: Any) -> dict[str, Any]:
    return message if message.get("content") is None else {**message, "content": content}


def _texts_of(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise UserError(f"the content is {content!r:.200}, which is neither text nor a list of parts of text")
    return texts


def _are_written(messages: Messages, rendered: str) -> bool:
    """Check that a rendering contains the text of all messages, and no Python repr of their parts."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    texts = [text for message in messages for text in _texts_of(message)]
    return all(text.strip()[-_SEARCHED_CHARACTERS:] in rendered for text in texts) and not any(
        repr(part) in rendered for part in parts
    )


_ANSWER_COLUMNS = (("chosen", "rejected"), ("completions",), ("messages",))
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's roles; other roles keep their names


def convert_row(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a raw row to the form that training and scoring read.

    Messages may be JSON text, have `from` and `value`, or be in the columns `chosen_messages` and `rejected_messages`.
    A single message becomes a list. A `completion` with a `label` or `score` becomes a single labeled answer.
    ShareGPT's `conversations` becomes the prompt if the answers do not contain it. A null `prompt` counts as absent.
    Nulls in messages and tools are dropped, because Arrow adds them; null content is kept.

    Returns:
        A new row with all other columns, and descriptions of the conversions; the list is empty for a row in TRL's
        form.
    """
    new, forms = {key: value for key, value in row.items() if key != "prompt" or value is not None}, set[str]()
    for half in _ANSWER_COLUMNS[0]:
        if new.get(half) is None and row.get(f"{half}_messages") is not None:
            new[half] = row[f"{half}_messages"]
            forms.add("`chosen_messages` and `rejected_messages`, read as `chosen` and `rejected`")
    label = new.get("label", new.get("score"))
    if isinstance(label, bool | int | float) and "completion" in new and not {"completions", "chosen"} & new.keys():
        new |= {"completions": [new["completion"]], "scores": [float(label)]}
        forms.add("`completion` with `label` or `score`, read as a single labeled answer")
    answers = next((form for form in _ANSWER_COLUMNS if set(form) <= new.keys()), ())
    texts = {key: new[key] for key in ("prompt", *answers) if _is_text(new.get(key))}
    parsed = {key: _parse_messages(text) for key, text in texts.items()}
    if any(parsed.values()):
        is_clear = all(parsed.get(key, True) for key in answers)
        new |= {key: messages for key, messages in parsed.items() if messages and is_clear}
        forms.add(f"messages as JSON text, {'parsed' if is_clear else 'kept as text next to plain text'}")
    for key in answers:
        is_list = key == "completions" and isinstance(new[key], list)
        new[key] = [_to_messages(answer, forms) for answer in new[key]] if is_list else _to_messages(new[key], forms)
    turns: Any = row.get("conversations")
    if "prompt" not in new and _first(turns, "from") and _first([new[key] for key in answers], "role") == "assistant":
        new["prompt"] = [{"from": "system", "value": row["system"]}, *turns] if row.get("system") else turns
    if "prompt" in new:
        new["prompt"] = _to_messages(new["prompt"], forms)
    if isinstance(new.get("tools"), list):
        new["tools"] = remove_none_values(new["tools"])
    return new, sorted(forms)


def _first(messages: Any, key: str) -> Any:
    """Return the value of a key in the first message, at any nesting depth; None without a message."""
    while isinstance(messages, list) and messages:
        messages = messages[0]
    return messages.get(key) if isinstance(messages, Mapping) else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_text, value)))


def _parse_messages(text: Any) -> Any:
    """Parse messages from JSON or Python text, or from a list of such texts; return None for any other text."""
    if isinstance(text, list):
        answers = [_parse_messages(answer) for answer in text]
        return answers if all(answers) else None
    may_be = text.lstrip().startswith(("[{", "{")) and ("content" in text or "value" in text)
    for parse in (json.loads, ast.literal_eval) if may_be else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            messages = value if isinstance(value := parse(text), list) else [value]
            keys = [set(turn) if isinstance(turn, dict) else set[str]() for turn in messages]
            return messages if all(turn >= {"role", "content"} or turn >= {"from", "value"} for turn in keys) else None
    return None


def _to_messages(value: Any, forms: set[str]) -> Any:
    """Convert a message, a list of messages, or a list of such lists; return any other value unchanged."""
    if isinstance(value, Mapping):
        return [_to_message(value, forms)]
    if not isinstance(value, list):
        return value
    return [_to_message(item, forms) if isinstance(item, Mapping) else _to_messages(item, forms) for item in value]


def _to_message(message: Mapping[str, Any], forms: set[str]) -> dict[str, Any]:
    new: dict[str, Any] = dict(remove_none_values(message))
    if "content" in message:  # templates distinguish null content (of a tool call) from absent content
        new["content"] = message["content"]
    if new.keys() >= {"from", "value"}:
        role, new["content"] = new.pop("from"), new.pop("value")
        new["role"] = _ROLES.get(role, role)
        forms.add("`from` and `value`, read as `role` and `content`")
    if isinstance(new.get("content"), list):
        new["content"] = [_to_part(part) for part in new["content"]]
    return new


def _to_part(part: Any) -> Any:
    is_value = isinstance(part, Mapping) and part.get("type") == "text" and part.get("text") is None
    return {"type": "text", "text": part["value"]} if is_value and part.get("value") is not None else part
