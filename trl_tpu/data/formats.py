"""Forms of preference data: text and messages, with explicit or implicit prompts, and their conversion."""

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
    """Drop the mapping entries that are None, at any depth: Arrow fills absent struct fields with them.

    For ``dataset.with_transform(remove_none_values)``, whose batches are mappings of lists.

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
        **settings: For the tokenizer's method; ``chat_template_kwargs`` is as in `template_arguments`.

    Raises:
        UserError: Content that is no text.
    """
    row_arguments = template_arguments(tools, settings.pop("chat_template_kwargs", None))
    arguments = row_arguments | settings | {"tokenize": False}
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


def template_arguments(tools: Any, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a row's tools, parsed if they are JSON text, and its variables for the template.

    Variables that are None are left out: Arrow adds those that only other rows have.
    """
    present = {key: value for key, value in (variables or {}).items() if value is not None}
    return present | {"tools": json.loads(tools) if isinstance(tools, str) else tools}


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


_FORMS = (("chosen", "rejected"), ("completions",), ("messages",))
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # of ShareGPT; other roles keep their names


def convert_row(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a raw row to the form that training and scoring read.

    Messages may be JSON text, have `from` and `value`, or be in `chosen_messages` and `rejected_messages`; a single
    message becomes a list. A `completion` with a `label` or `score` is an answer that is judged by itself. ShareGPT's
    `conversations` becomes the prompt of answers that do not contain it. A null `prompt` counts as absent. Nulls in
    messages and tools are dropped, except as content: Arrow adds them.

    Returns:
        A new row with all other columns, and descriptions of the forms that it had, none for TRL's.
    """
    new, forms = {key: value for key, value in row.items() if key != "prompt" or value is not None}, set[str]()
    for half in _FORMS[0]:
        if new.get(half) is None and row.get(f"{half}_messages") is not None:
            new[half] = row[f"{half}_messages"]
            forms.add("`chosen_messages` and `rejected_messages`, read as `chosen` and `rejected`")
    label = new.get("label", new.get("score"))
    if isinstance(label, bool | int | float) and "completion" in new and not {"completions", "chosen"} & new.keys():
        new |= {"completions": [new["completion"]], "scores": [float(label)]}
        forms.add("`completion` with `label` or `score`, read as an answer that is judged by itself")
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
