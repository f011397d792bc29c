"""TRL's path for what is installed."""

from transformers.utils import is_peft_available, is_torch_xpu_available

is_xpu_available = is_torch_xpu_available

__all__ = ["is_peft_available", "is_xpu_available"]
