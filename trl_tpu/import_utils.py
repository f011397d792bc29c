"""TRL's path for what is installed."""

from transformers.utils import is_peft_available as is_peft_available
from transformers.utils import is_torch_xpu_available as is_xpu_available  # noqa: F401
