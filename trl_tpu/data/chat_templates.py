"""TRL's functions for chat templates and prompts, and a warning about templates that write the current date."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .formats import Messages, apply_template, template_arguments

logger = logging.getLogger(__name__)

_CONVERSATION_KEYS = ("prompt", "chosen", "rejected", "completion", "messages")

_ANSWER_KEYS = ("chosen", "rejected", "completion")

_COLUMN_SETS: tuple[set[str], ...] = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"chosen", "rejected"},
    {"prompt", "chosen", "rejected"},
)


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Check whether the first of an example's `_CONVERSATION_KEYS` holds messages with a ``role``, not plain text."""
    value = next((example[key] for key in _CONVERSATION_KEYS if key in example), None)
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def apply_chat_template(
    example: dict[str, Any],
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Render a conversational example as text.

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
        KeyError: The columns match none of these formats.
        UserError: The prompt's last role is not user, tool or assistant, or content is not text.
    """
    keys = {key for key in (*_CONVERSATION_KEYS, "label") if key in example}
    if keys not in _COLUMN_SETS:
        raise KeyError(f"Invalid keys in the example: {keys}")
    render: Callable[..., Any] = partial(
        apply_template,
        processing_class,
        tools=tools or None,  # some templates write their tool preamble for an empty list
        chat_template_kwargs=example.get("chat_template_kwargs"),
        **template_kwargs,
    )
    label = {"label": example["label"]} if "label" in example else {}
    if "messages" in example:
        return {"text": render(example["messages"])}
    if "prompt" in example:
        return _render_with_prompt(example, render) | label
    return {key: render(example[key]) for key in _ANSWER_KEYS if key in example}


def _render_with_prompt(example: dict[str, Any], render: Callable[..., Any]) -> dict[str, Any]:
    last_role = example["prompt"][-1]["role"]
    if last_role not in ("user", "tool", "assistant"):
        raise UserError(f"Invalid role in the last message: {last_role}")
    continues = last_role == "assistant"
    prompt = render(example["prompt"], continue_final_message=continues, add_generation_prompt=not continues)
    conversations = {key: render(example["prompt"] + example[key]) for key in _ANSWER_KEYS if key in example}
    # The rendered prompt may end with text that the conversations lack, such as the tag before a thought. So use the
    # common prefix of all renderings as the prompt.
    shared = min((_common_length(prompt, text) for text in conversations.values()), default=len(prompt))
    return {"prompt": prompt[:shared], **{key: text[shared:] for key, text in conversations.items()}}


def _common_length(first: Sequence, second: Sequence) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))


def maybe_apply_chat_template(
    example: dict[str, Any],
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Apply the chat template to a conversational example; return any other example unchanged."""
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
    split = _common_length(chosen, rejected)
    if split == min(len(chosen), len(rejected)) or (split > 0 and chosen[split - 1] == " "):
        split = max(split - 1, 0)
    return {"prompt": chosen[:split], "chosen": chosen[split:], "rejected": rejected[split:]}


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Extract the prompt of a preference example without one; return any other example unchanged.

    A text ``prompt`` for answers that are messages is a copy for display, and is replaced. A prompt of messages for
    text answers is replaced, too.
    """
    has_prompt = "prompt" in example and (
        is_conversational({"chosen": example.get("chosen")}) == is_conversational({"prompt": example["prompt"]})
    )
    if has_prompt or not {"chosen", "rejected"} <= set(example):
        return example
    return extract_prompt({"chosen": example["chosen"], "rejected": example["rejected"]})


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
        variables = row.get("chat_template_kwargs")
        tools = template_arguments(row.get("tools"), variables)["tools"]
        render = partial(apply_template, tokenizer, messages, tools=tools, chat_template_kwargs=variables)
        with suppress(Exception):  # templates are programs and may raise any exception
            probed = render(chat_template=_FIXED_DATE.format(_DATE_PROBE) + tokenizer.get_chat_template(tools=tools))
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
