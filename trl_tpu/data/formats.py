"""The functions of TRL's public ``data_utils`` that reward scripts use: conversational examples as text.

An example is *standard* (plain strings) or *conversational* (lists of ``{"role", "content"}`` messages).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from ..errors import UserError, UserTypeError
from .chat import apply_template

ListOrMapping = TypeVar("ListOrMapping", list, Mapping)

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
    """Tell whether the dialogues are lists of messages with a ``role``, judged by the first dialogue column."""
    key = next((key for key in _DIALOGUE_KEYS if key in example), None)
    if key is None or not isinstance(example[key], list) or not example[key]:
        return False
    return isinstance(example[key][0], dict) and "role" in example[key][0]


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
    output: dict[str, Any] = {}
    if "messages" in example:
        output["text"] = render(example["messages"])
    elif "prompt" in example:
        output.update(_render_with_prompt(example, render))
    else:
        output.update({key: render(example[key]) for key in _ANSWER_KEYS if key in example})
    if "label" in example:
        output["label"] = example["label"]
    return output


def _render_with_prompt(example: dict[str, Any], render: Callable[..., Any]) -> dict[str, str]:
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
