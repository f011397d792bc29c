"""Forms of raw rows: conversion to the columns that training and scoring read, and chat templates."""

import ast
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def remove_none_values(example: Any) -> Any:
    """Drop mapping entries that are None, at any depth. Arrow adds such entries for absent struct fields.

    It also works as a transform of whole batches: ``dataset.with_transform(remove_none_values)``.
    """
    if isinstance(example, list):
        return [remove_none_values(item) for item in example]
    if isinstance(example, Mapping):
        return {key: remove_none_values(item) for key, item in example.items() if item is not None}
    return example


# Templates may drop the thoughts at the beginning of an assistant's text. So only the ends of texts are searched for.
_SEARCHED_CHARACTERS = 20

Messages = list[dict[str, Any]]


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Messages, /, **arguments: Any) -> str:
    """Render messages with the tokenizer's ``apply_chat_template``, in a content format that its template supports.

    Content is a text or a list of text parts. Templates that support only one of these formats may drop all other
    content, or print its Python repr. In that case the content is converted and rendered again.

    Args:
        tokenizer: The tokenizer with the template.
        messages: One conversation.
        **arguments: Arguments of the tokenizer's method, such as those of `template_arguments`.

    Raises:
        ValueError: The content of a message is not text.
    """
    render: Callable[[Messages], Any] = partial(tokenizer.apply_chat_template, **arguments | {"tokenize": False})
    as_text = [_with_content(turn, "".join(texts_of(turn))) for turn in messages]
    as_parts = [_with_content(turn, [{"type": "text", "text": text} for text in texts_of(turn)]) for turn in messages]
    for candidate in (messages, as_text, as_parts):
        try:
            rendered = render(candidate)
        except Exception:  # templates are programs and may raise anything
            continue
        if _has_all_text(candidate, rendered):
            return rendered
    return render(messages)  # no format is complete: return the first, or raise its error


def template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments for the chat template: its ``tools``, and the variables in ``chat_template_kwargs``.

    Tools are a list of functions or JSON schemas, or such a list as JSON text. A variable named `tools` takes
    precedence. Variables that are None are dropped, because Arrow adds them where only other rows have a variable.
    """
    tools, variables = row.get("tools"), row.get("chat_template_kwargs") or {}
    present = {key: value for key, value in variables.items() if value is not None}
    return {"tools": json.loads(tools.strip() or "null") if isinstance(tools, str) else tools} | present


def _with_content(message: dict[str, Any], content: Any) -> dict[str, Any]:
    return message if message.get("content") is None else {**message, "content": content}


def texts_of(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message: one, or one per part.

    Raises:
        ValueError: The content is not text.
    """
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ValueError(f"the content must be text or a list of text parts, got {content!r:.200}")
    return texts


def _has_all_text(messages: Messages, rendered: str) -> bool:
    """Check that a rendering contains the end of every text, and no Python repr of a content part."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    texts = [text for message in messages for text in texts_of(message)]
    return all(text.strip()[-_SEARCHED_CHARACTERS:] in rendered for text in texts) and not any(
        repr(part) in rendered for part in parts
    )


# ---- rows in other forms

#: Columns, besides `prompt`, `chosen` and `rejected`, that `convert_row` converts.
_OTHER_COLUMNS = frozenset(
    ["chosen_messages", "rejected_messages", "completion", "completions", "messages", "conversations", "tools"]
)
_PLAIN_TURN = {"role": str, "content": str}
#: Columns of answers. The first entry whose columns are all in a row applies.
_ANSWER_COLUMNS = (("chosen", "rejected"), ("completions",), ("completion",), ("messages",))
_TURNS = ("conversations", "messages")  # columns for the turns before the answers, as in ShareGPT and LLaMA-Factory
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's roles; other roles keep their names


def convert_row(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a raw row to the columns that training and scoring read.

    Messages may be JSON text, have `from` and `value`, or be in the columns `chosen_messages` and `rejected_messages`.
    A single message becomes a list. A `completion` with a `label` or `score` becomes a single labeled answer.
    ShareGPT's `conversations`, or `messages` with answers, become the prompt if the row has no `prompt`, its answers
    start with an assistant's message, and the turns end with another role. A null `prompt` counts as absent, and so
    does a text that is one of the messages of every answer. Nulls in messages and tools are dropped, because Arrow
    adds them. Null content is kept.

    Returns:
        The converted row, other columns included, and a description of each conversion. A row in TRL's format has
        none.
    """
    read = [row[key] for key in ("prompt", "chosen", "rejected") if key in row]
    # most rows need no conversion
    if not _OTHER_COLUMNS & row.keys() and len({*map(type, read)}) < 2 and all(map(_is_in_form, read)):
        return dict(row), []
    new, notes = {key: value for key, value in row.items() if key != "prompt" or value is not None}, set[str]()
    for column in _ANSWER_COLUMNS[0]:
        if new.get(column) is None and row.get(f"{column}_messages") is not None:
            new[column] = row[f"{column}_messages"]
            notes.add("`chosen_messages` and `rejected_messages`, read as `chosen` and `rejected`")
    label = new.get("score") if new.get("label") is None else new["label"]
    if isinstance(label, bool | int | float) and "completion" in new and not {"completions", "chosen"} & new.keys():
        new |= {"completions": [new["completion"]], "scores": [float(label)]}
    answers = next((columns for columns in _ANSWER_COLUMNS if set(columns) <= new.keys()), ())
    parsed = {key: _parse_messages(new[key]) for key in ("prompt", *answers) if _is_text(new.get(key))}
    if any(parsed.values()):
        all_parsed = all(parsed.get(key, True) for key in answers)
        new |= {key: messages for key, messages in parsed.items() if messages and all_parsed}
        notes.add(f"messages as JSON text, {'parsed' if all_parsed else 'kept as text next to a plain-text answer'}")
    for key in answers:
        is_list = key == "completions" and isinstance(new[key], list)
        new[key] = [_to_messages(answer, notes) for answer in new[key]] if is_list else _to_messages(new[key], notes)
    turns: Any = next((row[key] for key in _TURNS if key not in answers and isinstance(row.get(key), list)), [])
    last = _first(turns[-1:], "from") or _first(turns[-1:], "role")
    starts_answer = "prompt" not in new and _first([new[key] for key in answers], "role") == "assistant"
    if starts_answer and last and _ROLES.get(last, last) != "assistant":
        new["prompt"] = [{"role": "system", "content": row["system"]}, *turns] if row.get("system") else turns
        notes |= set() if _first(turns, "from") else {"`conversations` or `messages`, read as the prompt"}
    if "prompt" in new:
        new["prompt"] = _to_messages(new["prompt"], notes)
    lists = [new[key] if key == "completions" else [new[key]] for key in answers if key != "messages"]
    dialogues = [each for values in lists if isinstance(values, list) for each in values]
    if dialogues and isinstance(new.get("prompt"), str) and all(_repeats(new["prompt"], each) for each in dialogues):
        del new["prompt"]
        notes.add("answers whose messages include the text of `prompt`, so that column is not read")
    if isinstance(new.get("tools"), list):
        new["tools"] = remove_none_values(new["tools"])
    return new, sorted(notes)


def _is_in_form(value: Any) -> bool:
    """Check for plain text, or messages with only a role and a text."""
    if isinstance(value, list):
        return all(isinstance(turn, dict) and {key: type(turn[key]) for key in turn} == _PLAIN_TURN for turn in value)
    return isinstance(value, str) and not _may_be_messages(value)


def _repeats(prompt: str, conversation: Any) -> bool:
    """Check whether the text of a prompt is a message before the last one of a conversation."""
    turns = conversation[:-1] if isinstance(conversation, list) else []
    return any(isinstance(turn, Mapping) and str(turn.get("content")).strip() == prompt.strip() for turn in turns)


def _first(messages: Any, key: str) -> Any:
    """Return the value of a key in the first message, at any nesting depth; None without a message."""
    while isinstance(messages, list) and messages:
        messages = messages[0]
    return messages.get(key) if isinstance(messages, Mapping) else None


def _is_text(value: Any) -> bool:
    """Check for a text, or a non-empty list of texts, at any nesting depth."""
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_text, value)))


def _parse_messages(text: Any) -> Any:
    """Parse messages from JSON or Python text, or from a list of such texts; return None for any other text."""
    if isinstance(text, list):
        parsed = [_parse_messages(answer) for answer in text]
        return parsed if all(parsed) else None
    for parse in (json.loads, ast.literal_eval) if _may_be_messages(text) else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            messages = value if isinstance(value := parse(text), list) else [value]
            sets = [set(turn) if isinstance(turn, dict) else set[str]() for turn in messages]
            return messages if all(keys >= {"role", "content"} or keys >= {"from", "value"} for keys in sets) else None
    return None


def _may_be_messages(text: str) -> bool:
    return text.lstrip(" \n\t[").startswith("{") and ("content" in text or "value" in text)


def _to_messages(value: Any, notes: set[str]) -> Any:
    """Convert a message, a list of messages, or a list of such lists; return any other value unchanged."""
    if isinstance(value, Mapping):
        return [_to_message(value, notes)]
    if not isinstance(value, list):
        return value
    return [_to_message(item, notes) if isinstance(item, Mapping) else _to_messages(item, notes) for item in value]


def _to_message(message: Mapping[str, Any], notes: set[str]) -> dict[str, Any]:
    new: dict[str, Any] = dict(remove_none_values(message))
    if "content" in message:  # templates distinguish null content (of a tool call) from absent content
        new["content"] = message["content"]
    if new.keys() >= {"from", "value"}:
        role, new["content"] = new.pop("from"), new.pop("value")
        new["role"] = _ROLES.get(role, role)
        notes.add("`from` and `value`, read as `role` and `content`")
    if isinstance(new.get("content"), list):
        new["content"] = [_to_part(part) for part in new["content"]]
    return new


def _to_part(part: Any) -> Any:
    """Move the text of a content part from `value` to `text`; return any other part unchanged."""
    lacks_text = isinstance(part, Mapping) and part.get("type") == "text" and part.get("text") is None
    return {"type": "text", "text": part["value"]} if lacks_text and part.get("value") is not None else part


# ---- TRL's functions for chat templates and prompts

_CONVERSATION_KEYS = ("prompt", "chosen", "rejected", "completion", "messages")

_ANSWER_KEYS = ("chosen", "rejected", "completion")


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Check whether the first of a row's `_CONVERSATION_KEYS` holds messages with a ``role``, not plain text."""
    value = next((example[key] for key in _CONVERSATION_KEYS if key in example), None)
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def apply_chat_template(
    example: dict[str, Any],
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Render a conversational row as text.

    The columns keep their names, except that ``messages`` becomes ``text``. A prompt that ends with a user or tool
    turn gets the generation prompt. A prompt that ends with an assistant turn is left open, to be continued. Each
    answer is the part of the rendered conversation after the rendered prompt.

    Args:
        example: Columns of one of these formats: ``messages``; ``prompt``; ``prompt`` and ``completion``, optionally
            with ``label``; ``chosen`` and ``rejected``, optionally with ``prompt``. A column ``chat_template_kwargs``
            may hold a dictionary of variables for the template.
        processing_class: The tokenizer with the chat template.
        tools: Functions or their JSON schemas, for templates that support tools.
        **template_kwargs: Variables for the template.

    Raises:
        ValueError: The content of a message is not text.
    """
    # some templates write their tool preamble for an empty list
    arguments = template_arguments({**example, "tools": tools or None}) | template_kwargs
    render: Callable[..., Any] = partial(apply_template, processing_class, **arguments)
    label = {"label": example["label"]} if "label" in example else {}
    if "messages" in example:
        return {"text": render(example["messages"])}
    if "prompt" in example:
        return _render_with_prompt(example, render) | label
    return {key: render(example[key]) for key in _ANSWER_KEYS if key in example}


def _render_with_prompt(example: dict[str, Any], render: Callable[..., Any]) -> dict[str, Any]:
    continues = example["prompt"][-1]["role"] == "assistant"
    prompt = render(example["prompt"], continue_final_message=continues, add_generation_prompt=not continues)
    conversations = {key: render(example["prompt"] + example[key]) for key in _ANSWER_KEYS if key in example}
    # The rendered prompt may end with text that the conversations lack, such as the tag before a thought. So use the
    # common prefix of all renderings as the prompt.
    shared = len(os.path.commonprefix([prompt, *conversations.values()]))
    return {"prompt": prompt[:shared], **{key: text[shared:] for key, text in conversations.items()}}


def maybe_apply_chat_template(
    example: dict[str, Any],
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Apply the chat template to a conversational row; return any other row unchanged."""
    if is_conversational(example):
        return apply_chat_template(example, processing_class, tools, **template_kwargs)
    return example


def conversations_formatting_function(
    tokenizer: PreTrainedTokenizerBase, messages_field: str
) -> Callable[[Mapping[str, Any]], Any]:
    """Make a function that renders the messages column of a row or a batch of rows, as in TRL up to 0.11."""

    def render(rows: Mapping[str, Any]) -> Any:
        messages = rows[messages_field]
        if isinstance(messages[0], list):
            return [apply_template(tokenizer, conversation) for conversation in messages]
        return apply_template(tokenizer, messages)

    return render


def extract_prompt(example: Mapping[str, Sequence]) -> dict[str, Sequence]:
    """Split off the common prefix of ``chosen`` and ``rejected`` as ``prompt``.

    Both are text, compared by character, or lists of messages, compared by message. A space before the first
    difference stays with the answers. Each answer keeps at least one element, even if one is a prefix of the other.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    most = min(len(chosen), len(rejected))
    split = next((index for index in range(most) if chosen[index] != rejected[index]), most)
    if split == most or (split > 0 and chosen[split - 1] == " "):
        split = max(split - 1, 0)
    return {"prompt": chosen[:split], "chosen": chosen[split:], "rejected": rejected[split:]}


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Extract the prompt of a pair without one; return any other row unchanged.

    A text ``prompt`` for answers that are messages is a copy for display, and is replaced. A prompt of messages for
    text answers is replaced, too.
    """
    has_prompt = "prompt" in example and (
        is_conversational({"chosen": example.get("chosen")}) == is_conversational({"prompt": example["prompt"]})
    )
    if has_prompt or not {"chosen", "rejected"} <= set(example):
        return example
    return extract_prompt({"chosen": example["chosen"], "rejected": example["rejected"]})


# ---- the date in chat templates

# Templates call `strftime_now` for the date. A macro of this name, put before the template, overrides the function.
_FIXED_DATE = "{{% macro strftime_now(format) %}}{}{{% endmacro %}}"

_DATE_PROBE = "\x1f{{ format }}\x1f"  # writes the requested date format between two markers


def date_written(
    tokenizer: PreTrainedTokenizerBase, chats: Iterable[tuple[Messages, Mapping[str, Any]]]
) -> str | None:
    """Return today's date as the chat template writes it into the first chat, and warn; return None without a date.

    The chat is rendered twice, once with a `strftime_now` that returns the requested format instead of the date. The
    template writes a date if the renderings differ.

    Args:
        tokenizer: The tokenizer with the template.
        chats: Pairs of messages and their row. Only the first pair is read, and only if the template calls
            `strftime_now`.
    """
    if "strftime_now" not in str(tokenizer.chat_template):
        return None
    for messages, row in islice(chats, 1):
        variables = template_arguments(row)
        render = partial(apply_template, tokenizer, messages, **variables)
        with suppress(Exception):  # templates are programs and may raise any exception
            template = tokenizer.get_chat_template(tools=variables["tools"])
            probed = render(chat_template=_FIXED_DATE.format(_DATE_PROBE) + template)
            if probed != render():
                date_format = re.search("\x1f(.*?)\x1f", probed)
                today = datetime.now().strftime(date_format[1] if date_format else "%Y-%m-%d")
                _warn_of_date(today)
                return today
    return None


@cache  # warn once, although scoring calls this for each window of rows
def _warn_of_date(today: str) -> None:
    logger.warning(
        f"The chat template writes the current date into conversations, {today!r} today, so their rewards change from "
        f"day to day. Let the template always write the date of training: put `{_FIXED_DATE.format(today)}`, with "
        "that date, at the beginning of the template, in `tokenizer.chat_template`, in the file that "
        "`chat_template_path` names, or in a saved model's chat_template.jinja."
    )
