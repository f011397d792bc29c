"""Functions of `trl_tpu.data` at TRL's module path."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from .data.chat_templates import apply_chat_template as apply_chat_template
from .data.chat_templates import extract_prompt as extract_prompt
from .data.chat_templates import is_conversational as is_conversational
from .data.chat_templates import maybe_apply_chat_template as maybe_apply_chat_template
from .data.chat_templates import maybe_extract_prompt as maybe_extract_prompt
from .data.checks import column_names
from .data.kinds.base import tokenize_conversation

get_dataset_column_names = column_names


def _tokenize(
    processing_class: PreTrainedTokenizerBase, input: str | list, *, tools: Any = None, **chat_template_kwargs: Any
) -> dict[str, list[int]]:
    """Tokenize plain text directly, or messages through the chat template."""
    row = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    return {"input_ids": tokenize_conversation(input, processing_class, row, "A conversation")[0]}
