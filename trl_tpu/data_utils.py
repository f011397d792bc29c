"""Functions of `trl_tpu.data` at TRL's module path."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from .data.checks import column_names as get_dataset_column_names  # noqa: F401
from .data.formats import apply_chat_template as apply_chat_template
from .data.formats import extract_prompt as extract_prompt
from .data.formats import is_conversational as is_conversational
from .data.formats import maybe_apply_chat_template as maybe_apply_chat_template
from .data.formats import maybe_extract_prompt as maybe_extract_prompt
from .data.kinds.base import tokenize_conversation


def _tokenize(
    processing_class: PreTrainedTokenizerBase, input: str | list, *, tools: Any = None, **chat_template_kwargs: Any
) -> dict[str, list[int]]:
    """Tokenize plain text directly, or messages through the chat template."""
    row = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    return {"input_ids": tokenize_conversation(input, processing_class, row, "A conversation")[0]}
