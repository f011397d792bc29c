"""Common forms of preference rows, converted to TRL's row by row, for training and for scoring."""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .formats import remove_none_values

_FORMS = (("chosen", "rejected"), ("completions",), ("messages",))
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # of ShareGPT; other roles keep their names


def convert_row(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a raw row to the form that training and scoring read.

    Messages may be JSON text, have `from` and `value`, or be in `chosen_messages` and `rejected_messages`; a single
    message becomes a list. ShareGPT's `conversations` becomes the prompt of answers that do not contain it. A null
    `prompt` counts as absent. Nulls in messages and tools are dropped, except as content: Arrow adds them.

    Returns:
        A new row with all other columns, and descriptions of the forms that it had, none for TRL's.
    """
    new, forms = {key: value for key, value in row.items() if key != "prompt" or value is not None}, set[str]()
    for half in _FORMS[0]:
        if new.get(half) is None and row.get(f"{half}_messages") is not None:
            new[half] = row[f"{half}_messages"]
            forms.add("`chosen_messages` and `rejected_messages`, read as `chosen` and `rejected`")
    answers = next((form for form in _FORMS if set(form) <= new.keys()), ())
    texts = {key: new[key] for key in ("prompt", *answers) if _is_text(new.get(key))}
    parsed = {key: _parsed(text) for key, text in texts.items()}
    if any(parsed.values()):
        is_clear = all(parsed.get(key, True) for key in answers)
        new |= {key: messages for key, messages in parsed.items() if messages and is_clear}
        forms.add(f"messages as JSON text, {'parsed' if is_clear else 'kept as text next to plain text'}")
    for key in answers:
        is_list = key == "completions" and isinstance(new[key], list)
        new[key] = [_messages(each, forms) for each in new[key]] if is_list else _messages(new[key], forms)
    turns: Any = row.get("conversations")
    if "prompt" not in new and _first(turns, "from") and _first([new[key] for key in answers], "role") == "assistant":
        new["prompt"] = [{"from": "system", "value": row["system"]}, *turns] if row.get("system") else turns
    if "prompt" in new:
        new["prompt"] = _messages(new["prompt"], forms)
    if isinstance(new.get("tools"), list):
        new["tools"] = remove_none_values(new["tools"])
    return new, sorted(forms)


def _first(messages: Any, key: str) -> Any:
    """Return a key of the first message, at any depth; None where there is none."""
    while isinstance(messages, list) and messages:
        messages = messages[0]
    return messages.get(key) if isinstance(messages, Mapping) else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_text, value)))


def _parsed(text: Any) -> Any:
    """Parse messages that are JSON or Python text, or a list of such texts; None for any other text."""
    if isinstance(text, list):
        answers = [_parsed(each) for each in text]
        return answers if all(answers) else None
    may_be = text.lstrip().startswith(("[{", "{")) and ("content" in text or "value" in text)
    for parse in (json.loads, ast.literal_eval) if may_be else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            messages = value if isinstance(value := parse(text), list) else [value]
            keys = [set(each) if isinstance(each, dict) else set[str]() for each in messages]
            return messages if all(each >= {"role", "content"} or each >= {"from", "value"} for each in keys) else None
    return None


def _messages(value: Any, forms: set[str]) -> Any:
    """Convert a message, a list of messages, or a list of such lists; any other value stays as it is."""
    if isinstance(value, Mapping):
        return [_message(value, forms)]
    if not isinstance(value, list):
        return value
    return [_message(each, forms) if isinstance(each, Mapping) else _messages(each, forms) for each in value]


def _message(message: Mapping[str, Any], forms: set[str]) -> dict[str, Any]:
    new: dict[str, Any] = dict(remove_none_values(message))
    if "content" in message:  # templates tell null content, of a call of tools, from absent content
        new["content"] = message["content"]
    if new.keys() >= {"from", "value"}:
        role, new["content"] = new.pop("from"), new.pop("value")
        new["role"] = _ROLES.get(role, role)
        forms.add("`from` and `value`, read as `role` and `content`")
    if isinstance(new.get("content"), list):
        new["content"] = [_part(part) for part in new["content"]]
    return new


def _part(part: Any) -> Any:
    is_value = isinstance(part, Mapping) and part.get("type") == "text" and part.get("text") is None
    return {"type": "text", "text": part["value"]} if is_value and part.get("value") is not None else part
