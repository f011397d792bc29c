"""TRL's path for `trl_tpu.modeling.load.clone_chat_template`."""

from trl_tpu.modeling.load import clone_chat_template

__all__ = ["clone_chat_template"]
