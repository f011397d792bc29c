"""TRL's path for `trl_tpu.modeling.tokenizer.clone_chat_template`."""

from .modeling.tokenizer import clone_chat_template as clone_chat_template
