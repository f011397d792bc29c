"""TRL's path for `trl_tpu.modeling.chat_template.clone_chat_template`."""

from .modeling.chat_template import clone_chat_template as clone_chat_template
