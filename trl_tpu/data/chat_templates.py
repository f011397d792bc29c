"""TRL's functions over chat templates and prompts, and the date that a template writes."""

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

_DIALOGUE_KEYS = ("prompt", "chosen", "rejected", "completion", "messages")

_ANSWER_KEYS = ("chosen", "rejected", "completion")

_TEMPLATE_FORMS: tuple[set[str], ...] = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"chosen", "rejected"},
    {"prompt", "chosen", "rejected"},
)


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Tell whether the first column of a conversation is a list of messages with a ``role``."""
    value = next((example[key] for key in _DIALOGUE_KEYS if key in example), None)
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def apply_chat_template(
    example: dict[str, Any],
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Render a conversational example as text.

    The columns keep their names, but ``messages`` becomes ``text``. A prompt that ends with a user or tool turn gets
    the generation prompt; one that ends with an assistant turn is left open, to be continued. Answers are what the
    whole dialogue's rendering adds to the prompt's.

    Args:
        example: Columns of one of the forms language modeling, prompt only, prompt and completion (with or without
            ``label``), preference (prompt explicit or implicit); optionally ``chat_template_kwargs``, a dictionary for
            the template.
        processing_class: The tokenizer whose chat template renders.
        tools: Functions or their JSON schemas, for templates that know tools.
        **template_kwargs: For the template.

    Raises:
        KeyError: The columns are of none of these forms.
        UserError: The prompt ends with a turn that is neither user's, tool's nor assistant's; a key of
            ``chat_template_kwargs`` that is not for the template; content that is no text for it.
    """
    keys = {key for key in (*_DIALOGUE_KEYS, "label") if key in example}
    if keys not in _TEMPLATE_FORMS:
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
    dialogues = {key: render(example["prompt"] + example[key]) for key in _ANSWER_KEYS if key in example}
    # A generation prompt may say more than the whole dialogue does at that place (an opened thought, say); what the
    # renderings have in common is the prompt.
    shared = min((_common_length(prompt, text) for text in dialogues.values()), default=len(prompt))
    return {"prompt": prompt[:shared], **{key: text[shared:] for key, text in dialogues.items()}}


def _common_length(first: Sequence, second: Sequence) -> int:
    """Count the elements that the two begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def maybe_apply_chat_template(
    example: dict[str, Any],
    processing_class: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Apply the chat template to a conversational example; any other is returned as it is."""
    if is_conversational(example):
        return apply_chat_template(example, processing_class, tools, **template_kwargs)
    return example


def conversations_formatting_function(
    tokenizer: PreTrainedTokenizerBase, messages_field: str
) -> Callable[[Mapping[str, Any]], Any]:
    """Make a function of a row, or of a batch of rows, that renders a column of messages: TRL's up to 0.11."""

    def render(rows: Mapping[str, Any]) -> Any:
        messages = rows[messages_field]
        if isinstance(messages[0], list):
            return [apply_template(tokenizer, each) for each in messages]
        return apply_template(tokenizer, messages)

    return render


def extract_prompt(example: Mapping[str, Sequence]) -> dict[str, Sequence]:
    """Split the common beginning of ``chosen`` and ``rejected`` off as ``prompt``.

    Dialogues are text (compared by character; a space before the first difference stays with the answers) or lists of
    messages (compared by message). Each answer keeps at least one element, also where one dialogue begins the other.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    split = _common_length(chosen, rejected)
    if split == min(len(chosen), len(rejected)) or (split > 0 and chosen[split - 1] == " "):
        split = max(split - 1, 0)
    return {"prompt": chosen[:split], "chosen": chosen[split:], "rejected": rejected[split:]}


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Extract the prompt of a preference example without one of its own; any other is returned as it is.

    A ``prompt`` in another form than ``chosen`` (text beside messages) is a copy for display, and does not count.
    """
    has_prompt = "prompt" in example and (
        is_conversational({"chosen": example.get("chosen")}) == is_conversational({"prompt": example["prompt"]})
    )
    if has_prompt or not {"chosen", "rejected"} <= set(example):
        return example
    return extract_prompt({"chosen": example["chosen"], "rejected": example["rejected"]})


# Templates ask `strftime_now` for the date, and a macro of that name before them answers in its place.
_FIXED_DATE = "{{% macro strftime_now(format) %}}{}{{% endmacro %}}"

_FORMAT = "\x1f{{ format }}\x1f"


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
        variables = row.get("chat_template_kwargs")
        tools = template_arguments(row.get("tools"), variables)["tools"]
        render = partial(apply_template, tokenizer, messages, tools=tools, chat_template_kwargs=variables)
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
