"""TRL's path for the functions of `trl_tpu.data.formats`."""

from .data.formats import apply_chat_template as apply_chat_template
from .data.formats import extract_prompt as extract_prompt
from .data.formats import is_conversational as is_conversational
from .data.formats import maybe_apply_chat_template as maybe_apply_chat_template
from .data.formats import maybe_extract_prompt as maybe_extract_prompt
